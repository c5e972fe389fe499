"""Requests per second of vLLM under a load that does not let up: as it comes and under policies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.bench.grid import Grid
from saccade.errors import SaccadeError

from .job import LoadJob, LoadSettings
from .load import Load, LoadedEngine
from .rows import LoadRow, row_of_load

STREAMED = 4
"""Prompts of a stream that may be under way at least, beside the most clients."""
FEWEST = 1024
"""Tokens of an answer that goes on while prompts come; how many are enough, only the run tells."""
ROUNDS = 4
"""Requests of every client that count."""


@dataclass(frozen=True, slots=True)
class ClientsSettings(LoadSettings):
    """What the user can choose; contexts are prompts' lengths, batches numbers of clients. None is the default."""

    new_tokens: int = 128
    requests: int | None = None
    stream: float | None = None

    def most_tokens(self, grid: Grid) -> int:
        if self.stream is not None and not 0 < self.stream < float("inf"):
            raise SaccadeError(f"stream={self.stream} is not valid: prompts a second, above 0")
        if self.stream and self.new_tokens < FEWEST:
            raise SaccadeError(f"new-tokens={self.new_tokens} is not valid beside --stream: at least {FEWEST}")
        return max(grid.contexts) + self.new_tokens


@dataclass(frozen=True, slots=True)
class ClientsJob(LoadJob):
    """Checked settings; points are numbers of clients."""

    row: ClassVar[type[Any]] = LoadRow
    asking: ClassVar[str] = "clients"
    settings: ClientsSettings

    @property
    def most(self) -> int:
        return max(self.points) + (STREAMED if self.settings.stream else 0)

    def measure(self, engines: Mapping[str, LoadedEngine], point: int) -> list[LoadRow]:
        chosen = self.settings
        load = Load(
            clients=point, lengths=self.grid.contexts, shared=chosen.shared, new_tokens=chosen.new_tokens,
            requests=chosen.requests or ROUNDS * point, vocabulary=self.vocabulary, stream=chosen.stream,
        )  # fmt: skip
        return [row_of_load(name, point, engine.serve(load), chosen.stream) for name, engine in engines.items()]
