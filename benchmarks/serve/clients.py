"""Requests per second of vLLM under a load that does not let up: as it comes and under policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.bench.engines import EngineJob, EngineSettings
from saccade.bench.grid import Grid
from saccade.bench.variants import STOCK_AGAIN
from saccade.errors import SaccadeError
from saccade.eval.output import whole_numbers
from saccade.methods.policy import Policy

from .load import Load, LoadedEngine
from .rows import LoadRow, row_of_load, under_load

BATCHED = {"cuda": 8192, "cpu": 2048}
"""Tokens of a step: what vLLM's server takes on an H100 and on other devices, where its `LLM` takes more."""

STREAMED = 4
"""Prompts of a stream that may be under way at least, beside the most clients."""
FEWEST = 1024
"""Tokens of an answer that goes on while prompts come; how many are enough, only the run tells."""
ROUNDS = 4
"""Requests of every client that count."""


@dataclass(frozen=True, slots=True)
class ClientsSettings(EngineSettings):
    """What the user can choose; contexts are prompts' lengths, batches numbers of clients. None is the default."""

    new_tokens: int = 128
    shared: float = 0.0
    requests: int | None = None
    stream: float | None = None


@dataclass(frozen=True, slots=True)
class ClientsJob(EngineJob[int]):
    """Checked settings; points are numbers of clients."""

    row: ClassVar[type[Any]] = LoadRow
    program: ClassVar[tuple[str, ...]] = ("python", "-m", "benchmarks")
    settings: ClientsSettings

    @classmethod
    def check(cls, settings: ClientsSettings) -> ClientsJob:
        """Read settings, or raise a SaccadeError: one line about the first that is not valid."""
        points = whole_numbers("clients", ",".join(settings.batches), at_least=1)
        grid = Grid.check(settings)
        if not 0 <= settings.shared < 1:
            raise SaccadeError(f"shared={settings.shared} is not valid: a share of each prompt, from 0 to below 1")
        if settings.stream is not None and not 0 < settings.stream < float("inf"):
            raise SaccadeError(f"stream={settings.stream} is not valid: prompts a second, above 0")
        if settings.stream and settings.new_tokens < FEWEST:
            raise SaccadeError(f"new-tokens={settings.new_tokens} is not valid beside --stream: at least {FEWEST}")
        block, policies, notes = settings.check(grid)
        groups = tuple((name,) for name in (*policies, STOCK_AGAIN))
        longest = max(grid.contexts) + settings.new_tokens
        return cls(grid, notes, settings, policies, points, groups, block, longest)

    @property
    def most(self) -> int:
        return max(self.points) + (STREAMED if self.settings.stream else 0)

    def start(self, policy: Policy | None, settings: dict[str, Any]) -> LoadedEngine:
        most = BATCHED[self.grid.device.type]
        given = {"draft_rate": self.settings.draft_rate, "adaptive": True, "max_num_batched_tokens": most}
        return LoadedEngine(self.settings.served(policy), **given, **settings)

    def blocks(self, point: int) -> int:
        return self.blocks_of(self.longest, point + self.most - max(self.points))

    def needed(self, point: int) -> int:
        # Requests that find no room wait for it, as they would when served.
        return self.blocks_of(self.longest, 1)

    def said(self, point: int) -> str:
        return f"{point} clients"

    def measure(self, engines: Mapping[str, LoadedEngine], point: int) -> list[LoadRow]:
        chosen, vocabulary = self.settings, self.grid.config.get_text_config().vocab_size
        load = Load(
            clients=point, lengths=self.grid.contexts, shared=chosen.shared, new_tokens=chosen.new_tokens,
            requests=chosen.requests or ROUNDS * point, vocabulary=vocabulary, stream=chosen.stream,
        )  # fmt: skip
        return [row_of_load(name, point, engine.serve(load), chosen.stream) for name, engine in engines.items()]

    def compare(self, rows: Sequence[LoadRow], bandwidth: float) -> list[LoadRow]:
        return under_load(rows)
