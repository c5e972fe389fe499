"""What a load on vLLM's engines is checked for and started with: as it comes and under policies."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from saccade.bench.engines import EngineJob, EngineSettings
from saccade.bench.grid import Grid
from saccade.bench.variants import STOCK_AGAIN
from saccade.errors import SaccadeError
from saccade.eval.output import whole_numbers
from saccade.methods.policy import Policy

from .load import LoadedEngine
from .rows import beside_stock

BATCHED = {"cuda": 8192, "cpu": 2048}
"""Tokens of a step: what vLLM's server takes on an H100 and on other devices, where its `LLM` takes more."""

AnyJob = TypeVar("AnyJob", bound="LoadJob")


@dataclass(frozen=True, slots=True)
class LoadSettings(EngineSettings, ABC):
    """What the user can choose; batches are numbers of those who ask. None is the default."""

    shared: float = 0.0

    @abstractmethod
    def most_tokens(self, grid: Grid) -> int:
        """Of a row; or raise a SaccadeError about the first setting of this load that is not valid."""


@dataclass(frozen=True, slots=True)
class LoadJob(EngineJob[int]):
    """Checked settings; points are numbers of those who ask, whom `asking` names."""

    asking: ClassVar[str]
    program: ClassVar[tuple[str, ...]] = ("python", "-m", "benchmarks")
    settings: LoadSettings

    @classmethod
    def check(cls: type[AnyJob], settings: LoadSettings) -> AnyJob:
        """Read settings, or raise a SaccadeError: one line about the first that is not valid."""
        points = whole_numbers(cls.asking, ",".join(settings.batches), at_least=1)
        grid = Grid.check(settings)
        if not 0 <= settings.shared < 1:
            raise SaccadeError(f"shared={settings.shared} is not valid: a share of each prompt, from 0 to below 1")
        block, policies, notes = settings.check(grid)
        longest = settings.most_tokens(grid)
        groups = tuple((name,) for name in (*policies, STOCK_AGAIN))
        return cls(grid, notes, settings, policies, points, groups, block, longest)

    @property
    def most(self) -> int:
        return max(self.points)

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
        return f"{point} {self.asking}"

    def compare(self, rows: Sequence[Any], bandwidth: float) -> list[Any]:
        return beside_stock(rows)

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""
        size: int = self.grid.config.get_text_config().vocab_size
        return size
