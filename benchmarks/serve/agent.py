"""An agent's day on vLLM: as it comes and under policies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.bench.grid import Grid
from saccade.checkpoints.presets import is_preset
from saccade.errors import SaccadeError
from saccade.eval.context import ANSWER_TOKENS
from saccade.eval.output import whole_numbers
from saccade.methods.policy import Policy

from .day import Day, replay
from .day_rows import DayRow, row_of_day
from .job import LoadJob, LoadSettings
from .load import LoadedEngine
from .told import MOST_TURNS


@dataclass(frozen=True, slots=True)
class AgentSettings(LoadSettings):
    """What the user can choose; contexts are a first prompt and a whole conversation, batches conversations at once."""

    turns: int = 20
    answers: str = "50,800"
    facts: bool = False

    def bounds(self) -> tuple[int, int]:
        """The shortest answer and the longest."""
        shortest, *others = whole_numbers("answers", self.answers, at_least=2)
        if len(others) > 1 or shortest > (longest := others[0] if others else shortest):
            raise SaccadeError(f"answers={self.answers} is not valid: the shortest and the longest, such as 50,800")
        return shortest, longest

    def most_tokens(self, grid: Grid) -> int:
        start, end, longest = grid.contexts[0], grid.contexts[-1], self.bounds()[1]
        need = start + self.turns * longest + self.turns - 1
        if end < need:
            told = f"{self.turns} answers of up to {longest} tokens behind {start}"
            raise SaccadeError(f"end={end} has no room for {told} and for what is said between them: at least {need}")
        if self.facts and self.bounds()[0] < ANSWER_TOKENS:
            raise SaccadeError(f"answers={self.answers} is not valid with facts: of at least {ANSWER_TOKENS} tokens")
        if self.facts and is_preset(self.shape):
            raise SaccadeError(f"shape={self.shape} is not valid with facts: a folder with weights and tokenizer")
        if self.facts and self.turns > MOST_TURNS:
            raise SaccadeError(f"turns={self.turns} is not valid with facts: at most {MOST_TURNS}")
        for point in grid.batches:
            list(self.day(grid, point).scripts)
        return end

    def day(self, grid: Grid, conversations: int) -> Day:
        """What so many conversations ask."""
        (start, end), vocabulary = (grid.contexts[0], grid.contexts[-1]), grid.config.get_text_config().vocab_size
        model = self.shape if self.facts else None
        return Day(conversations, self.turns, start, end, self.shared, self.bounds(), vocabulary, model=model)


@dataclass(frozen=True, slots=True)
class AgentJob(LoadJob):
    """Checked settings; points are numbers of conversations."""

    row: ClassVar[type[Any]] = DayRow
    asking: ClassVar[str] = "conversations"
    settings: AgentSettings

    def start(self, policy: Policy | None, settings: dict[str, Any]) -> LoadedEngine:
        real = {"model": self.settings.shape, "load_format": "auto"} if self.settings.facts else {}
        return LoadJob.start(self, policy, settings | real)

    def measure(self, engines: Mapping[str, LoadedEngine], point: int) -> list[DayRow]:
        day = self.settings.day(self.grid, point)
        return [row_of_day(name, day, replay(engine, day)) for name, engine in engines.items()]
