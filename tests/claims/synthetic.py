"""Claims and samples made up for tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from claims.judging.claim import RESA, Claim, Group, Sample, Source, Test
from claims.judging.effects import QUARTILES, TEXTS
from claims.judging.study import Study

LESS = Test("right, a minus b", "right", Group("a"), Group("b"))


@dataclass(frozen=True, slots=True)
class Given:
    interval: ClassVar[str] = TEXTS

    samples: tuple[Sample, ...] = ()

    def units(self, study: Study) -> int:
        return len(self.samples)

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        for sample in self.samples:
            advance(sample.arm)
        return self.samples

    def conditions(self, study: Study) -> dict[str, Any]:
        return {"model": "made up", "device": "cpu"}


class Timed(Given):
    """The same, of timings."""

    interval: ClassVar[str] = QUARTILES


def claim(
    *tests: Test, premises: Sequence[Test] = (), samples: Sequence[Sample] = (), says: str = "It is so."
) -> Claim:
    return Claim(says, Source(RESA, "figure 0"), Given(tuple(samples)), tests or (LESS,), tuple(premises))


def samples(arm: str, *values: float, measure: str = "right") -> list[Sample]:
    return [Sample(str(number), arm, {measure: value}) for number, value in enumerate(values)]
