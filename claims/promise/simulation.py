"""Simulated answers whose questions fail together by text, judged as `saccade tune` judges.

The correlation between the questions of one text is made in four ways, each by itself and for dense attention's errors,
the candidate's losses and its gains alike:

- `even`: every text has a probability of its own, from a beta distribution.
- `rare`: a few texts have a high probability, all others none.
- `whole`: with the correlation as probability, a text's questions have one outcome, or else each its own.
- `joint`: as `whole`, but a text where they have one has it for dense attention and the candidate at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy
from scipy.stats import binom

from saccade.calibrate.promise import ALPHA, ratio_shown, texts_needed

WAYS = ("even", "rare", "whole", "joint")
_BATCH = 2_000_000
"""Numbers that are drawn at once."""

Counts = numpy.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class World:
    """What is asked, and how dense attention and a candidate answer.

    Attributes:
        loss: 1 - ratio of accuracies.
        gain: share of what the candidate loses that it gains elsewhere, beyond `loss`.
    """

    texts: int
    asked: int
    accuracy: float
    loss: float
    correlation: float
    way: str
    gain: float

    @property
    def possible(self) -> bool:
        """Whether there is such a world that is not another's double."""
        alone = self.correlation == 0 or self.asked == 1
        doubled = alone and (self.correlation > 0 or self.way != "even")
        return not doubled and (self.gain == 0 or 0 < self._gains <= 1)

    @property
    def _losses(self) -> float:
        """Probability that a question which dense attention has right is lost."""
        return self.loss / (1 - self.gain)

    @property
    def _gains(self) -> float:
        """Probability that a question which dense attention has wrong is gained."""
        more = self._losses - self.loss
        return more * self.accuracy / (1 - self.accuracy) if self.accuracy < 1 else 0.0

    def passing(self, quality: float, runs: int, rng: numpy.random.Generator) -> int:
        """In how many of so many runs the candidate passes alone."""
        passed, step = 0, max(_BATCH // self.texts, 1)
        for begin in range(0, runs, step):
            lost, gained, right = self._draw(min(step, runs - begin), rng)
            # A quality that is a hair above the ratio is one that the candidate misses.
            passed += int((ratio_shown(lost, gained, right, ALPHA) >= quality - 1e-12).sum())
        return passed

    def _draw(self, runs: int, rng: numpy.random.Generator) -> tuple[Counts, Counts, Counts]:
        """Counts `[runs, texts]`: lost, gained, right."""
        wrong, one = self.wrong(runs, rng)
        return *self.changes(wrong, one, rng), self.asked - wrong

    def wrong(self, runs: int, rng: numpy.random.Generator) -> tuple[Counts, Counts | None]:
        """Counts `[runs, texts]` of dense attention's wrong answers, and which texts have one outcome for everyone."""
        shape, asked = (runs, self.texts), numpy.full((runs, self.texts), self.asked)
        one = rng.random(shape) < self.correlation if self.way == "joint" else None
        return self._events(1 - self.accuracy, asked, one, rng), one

    def changes(self, wrong: Counts, one: Counts | None, rng: numpy.random.Generator) -> tuple[Counts, Counts]:
        """What the candidate loses and gains, counts `[runs, texts]`, beside dense attention's wrong answers."""
        lost = self._events(self._losses, self.asked - wrong, one, rng)
        return lost, self._events(self._gains, wrong, one, rng)

    def _events(self, mean: float, among: Counts, one: Counts | None, rng: numpy.random.Generator) -> Counts:
        """How many of the questions of each text something happens to."""
        chances: Any = mean
        if 0 < mean < 1 and self.correlation > 0:
            if self.way == "even":
                scale = (1 - self.correlation) / self.correlation
                chances = rng.beta(mean * scale, (1 - mean) * scale, among.shape)
            elif self.way == "rare":
                high = mean + self.correlation * (1 - mean)
                chances = numpy.where(rng.random(among.shape) < mean / high, high, 0.0)
            else:
                as_one = rng.random(among.shape) < self.correlation if one is None else one
                chances = numpy.where(as_one, rng.random(among.shape) < mean, mean)
        return rng.binomial(among, chances)


@dataclass(frozen=True, slots=True)
class Grid:
    """The worlds of a simulation: every combination that is possible."""

    texts: Sequence[int] = (8, 15, 30, 46, 60, 100, 150, 200)
    asked: Sequence[int] = (1, 4, 12, 24)
    accuracies: Sequence[float] = (0.5, 0.75, 0.9, 1.0)
    losses: Sequence[float] = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
    correlations: Sequence[float] = (0.0, 0.1, 0.3, 0.6)
    ways: Sequence[str] = WAYS
    gains: Sequence[float] = (0.0, 0.5)

    def worlds(self) -> Iterator[World]:
        every = (self.texts, self.asked, self.accuracies, self.losses, self.correlations, self.ways, self.gains)
        return (world for world in map(World, *zip(*product(*every), strict=True)) if world.possible)


def errors(grid: Grid, runs: int, again: int, seed: int) -> dict[str, Any]:
    """How often candidates pass whose ratio is just below what is wanted.

    Worlds in which more than alpha of the `runs` pass are judged by `again` others, since the worst of many cells is
    too bad by luck. Designs of fewer texts than are needed are refused: counted, not drawn.

    Returns, JSON-ready: `worlds` drawn; of each design and correlation the worst one, in `rows`; the `refused` designs
    with what they need; how many worlds `exceed` alpha by more than once in a hundred such simulations would happen by
    luck (binomial, Bonferroni).
    """
    rows: list[dict[str, Any]] = []
    refused: dict[tuple[int, int, float], int] = {}
    for number, world in enumerate(grid.worlds()):
        quality = 1 - world.loss
        needed = texts_needed(quality, world.asked)
        if world.texts < needed:
            refused[world.texts, world.asked, world.loss] = needed
            continue
        rng = numpy.random.default_rng([seed, number])
        drawn, passed = runs, world.passing(quality, runs, rng)
        if passed > ALPHA * runs:
            drawn, passed = again, world.passing(quality, again, rng)
        rows.append({**asdict(world), "runs": drawn, "passed": passed, "rate": passed / drawn})
    limit = 0.01 / max(len(rows), 1)
    worst: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["rate"]):
        worst.setdefault(tuple(row[name] for name in ("texts", "asked", "loss", "correlation")), row)
    return {
        "worlds": len(rows),
        "exceed": sum(row["passed"] > int(binom.isf(limit, row["runs"], ALPHA)) for row in rows),
        "rows": list(worst.values()),
        "refused": [dict(zip(("texts", "asked", "loss", "needed"), (*design, needed), strict=True))
                    for design, needed in refused.items()],
    }  # fmt: skip


def power(grid: Grid, quality: float, runs: int, seed: int) -> list[dict[str, Any]]:
    """How often a candidate passes that answers as dense attention does, JSON-ready; None where it is refused."""
    rows = []
    for number, world in enumerate(grid.worlds()):
        rng = numpy.random.default_rng([seed, number])
        needed = texts_needed(quality, world.asked)
        rate = world.passing(quality, runs, rng) / runs if world.texts >= needed else None
        rows.append({**asdict(world), "quality": quality, "runs": runs, "needed": needed, "rate": rate})
    return rows
