"""Requests per second of vLLM under a load that does not let up: as it comes and under policies."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import SaccadeError
from ..eval.output import whole_numbers
from ..methods.policy import Policy
from .engines import EngineJob, EngineSettings
from .grid import Grid
from .load import Load, LoadedEngine, Served
from .rows import LoadRow, under_load
from .variants import STOCK_AGAIN

BATCHED = {"cuda": 8192, "cpu": 2048}
"""Tokens of a step: what vLLM's server takes on an H100 and on other devices, where its `LLM` takes more."""

ROUNDS = 4
"""Requests of every client that count."""


@dataclass(frozen=True, slots=True)
class ClientsSettings(EngineSettings):
    """What the user can choose; contexts are prompts' lengths, batches numbers of clients. None is the default."""

    new_tokens: int = 128
    shared: float = 0.0
    requests: int | None = None


@dataclass(frozen=True, slots=True)
class ClientsJob(EngineJob[int, LoadRow]):
    """Checked settings; points are numbers of clients."""

    row: ClassVar[type[Any]] = LoadRow
    settings: ClientsSettings

    @classmethod
    def check(cls, settings: ClientsSettings) -> ClientsJob:
        """Read settings, or raise a SaccadeError: one line about the first that is not valid."""
        points = whole_numbers("clients", ",".join(settings.batches), at_least=1)
        grid = Grid.check(settings)
        if not 0 <= settings.shared < 1:
            raise SaccadeError(f"shared={settings.shared} is not valid: a share of each prompt, from 0 to below 1")
        block, policies, notes = settings.check(grid)
        groups = tuple((name,) for name in (*policies, STOCK_AGAIN))
        longest = max(grid.contexts) + settings.new_tokens
        return cls(grid, notes, settings, policies, points, groups, block, longest)

    @property
    def most(self) -> int:
        return max(self.points)

    def start(self, policy: Policy | None, settings: dict[str, Any]) -> LoadedEngine:
        return LoadedEngine(
            self.settings.served(policy), max_num_batched_tokens=BATCHED[self.grid.device.type], **settings
        )

    def blocks(self, point: int) -> int:
        return self.blocks_of(self.longest, point)

    def needed(self, point: int) -> int:
        # Requests that find no room wait for it, as they would when served.
        return self.blocks_of(self.longest, 1)

    def said(self, point: int) -> str:
        return f"{point} clients"

    def measure(self, engines: Mapping[str, LoadedEngine], point: int) -> list[LoadRow]:
        load = Load(
            clients=point,
            lengths=self.grid.contexts,
            shared=self.settings.shared,
            new_tokens=self.settings.new_tokens,
            requests=self.settings.requests or ROUNDS * point,
            vocabulary=self.grid.config.get_text_config().vocab_size,
        )
        return [row_of_load(name, point, engine.serve(load)) for name, engine in engines.items()]

    def compare(self, rows: Sequence[LoadRow], bandwidth: float) -> list[LoadRow]:
        return under_load(rows)


def row_of_load(policy: str, clients: int, served: Served) -> LoadRow:
    """Rates and percentiles of what was seen."""
    (first, first_p99), (later, later_p99) = percentiles(served.firsts), percentiles(served.gaps)
    return LoadRow(
        policy=policy,
        clients=clients,
        requests=served.requests,
        seconds=served.seconds,
        requests_per_second=served.requests / served.seconds,
        tokens_per_second=served.tokens / served.seconds,
        prompt_tokens=served.prompt_tokens / served.requests,
        cached_share=served.cached_tokens / served.prompt_tokens,
        first_ms=first,
        first_ms_p99=first_p99,
        firsts=len(served.firsts),
        next_ms=later,
        next_ms_p99=later_p99,
        gaps=len(served.gaps),
    )


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds; of one time twice that, of none zeros."""
    if len(seconds) < 2:
        only = 1e3 * sum(seconds)
        return only, only
    return 1e3 * statistics.median(seconds), 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[98]
