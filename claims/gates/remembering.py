"""What trainings on the same texts need alike is made once: a text, its reading, and what the teacher says."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from saccade.calibrate.mixture import Mixture, Text
from saccade.calibrate.problems import Problem, Problems


class RememberedProblems:
    """Problems of which each is made once, until `forget`."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._made: dict[int, Problem] = {}

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, number: int) -> Problem:
        if number not in self._made:
            self._made[number] = self._problems[number]
        return self._made[number]

    def forget(self) -> None:
        """Make room for the next ones."""
        self._made.clear()


class RememberingMixture(Mixture):
    """A mixture that reads every text once and asks the teacher once about it, until `forget`.

    A text is followed by the same tokens whenever it is read: those of its problem.
    """

    def __init__(self, model: Any, kept: float, *, frugal: bool) -> None:
        super().__init__(model, kept, frugal=frugal)
        self._read: dict[tuple[int, ...], Text] = {}
        self._said: dict[tuple[Any, ...], Any] = {}

    def read(self, tokens: Sequence[int]) -> Text:
        key = tuple(tokens)
        if key not in self._read:
            self._read[key] = super().read(tokens)
        return self._read[key]

    def follow(self, text: Text, tokens: Tensor, gates: Tensor | None, **asked: Any) -> Any:
        if gates is not None:
            return super().follow(text, tokens, gates, **asked)
        # Texts are held by `_read`, so that no other one has this one's identity.
        key = id(text), *asked
        if key not in self._said:
            self._said[key] = super().follow(text, tokens, None, **asked)
        return self._said[key]

    def forget(self) -> None:
        """Make room for the next texts."""
        self._read.clear()
        self._said.clear()
