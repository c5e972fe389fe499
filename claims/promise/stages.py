"""Simulated runs of `saccade tune` with many families: all judged by all texts, or screened and two of them judged.

All candidates of a run answer the same simulated texts. Both ways are asked as many texts as `saccade tune` asks where
nobody says how many; what both ask is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy
from scipy.stats import binom

from saccade.calibrate.promise import (
    ALPHA,
    FINALISTS,
    MARGIN,
    Marks,
    Tables,
    cheapest,
    finalists,
    ratio_to_screen,
    screen,
    texts_needed,
    texts_to_screen,
    walk,
)

from .command import FAILING
from .simulation import WAYS, World

BOTH = ("all judged", "screened")
FAMILIES = 8
_AT_ONCE = 50
"""Runs that are drawn together."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Families of candidates, and how everybody answers.

    Attributes:
        name: what the families have in common.
        losses: of every family, the cheapest first, what its rungs lose, the most expensive first: 1 - ratio of
            accuracies, in units of what may be lost. From 1 on a candidate is one that fails.
        accuracy, correlation, way, gain: see `World`.
    """

    name: str
    losses: tuple[tuple[float, ...], ...]
    quality: float
    correlation: float
    way: str
    accuracy: float = 1.0
    gain: float = 0.0
    asked: int = 12

    def chosen(self, runs: int, rng: numpy.random.Generator) -> dict[str, Counter[float]]:
        """How often which loss was chosen by both ways; -1: nothing was, dense attention stays."""
        first = texts_to_screen(self.quality, self.asked)
        all_judged, behind = (
            texts_needed(self.quality, self.asked, count, margin=MARGIN) for count in (len(self.losses), FINALISTS)
        )
        ladders = {str(place): [f"{place}.{rung}" for rung in range(len(one))] for place, one in enumerate(self.losses)}
        losses = {f"{place}.{rung}": loss for place, one in enumerate(self.losses) for rung, loss in enumerate(one)}
        costs = {spec: place for place, spec in enumerate(spec for ladder in ladders.values() for spec in ladder[::-1])}
        quality = self.quality - 1e-12  # a quality that is a hair above a ratio is one that the candidate misses
        wanted = ratio_to_screen(self.quality, behind, self.asked)
        counted = {way: Counter[float]() for way in BOTH}
        for tables, dense in self._drawn(losses, max(all_judged, first + behind), runs, rng):
            before = {spec: table[:first] for spec, table in tables.items()}
            going = finalists(screen(ladders, before, dense[:first], wanted), costs)
            for way, families, part in zip(
                BOTH, (ladders, going), (slice(all_judged), slice(first, first + behind)), strict=True
            ):
                judged = {spec: tables[spec][part] for members in families.values() for spec in members}
                best = cheapest(walk(families, judged, dense[part], quality), costs)
                counted[way][-1.0 if best is None else losses[best]] += 1
        return counted

    def _drawn(
        self, losses: Mapping[str, float], texts: int, runs: int, rng: numpy.random.Generator
    ) -> Iterator[tuple[Tables, Marks]]:
        """Everybody's answers, run by run; which of a text's questions are right matters to nobody."""
        world = World(texts, self.asked, self.accuracy, 0.0, self.correlation, self.way, self.gain)
        places = numpy.arange(self.asked)
        for begin in range(0, runs, _AT_ONCE):
            wrong, one = world.wrong(min(_AT_ONCE, runs - begin), rng)
            right = (self.asked - wrong)[..., None]
            counts = {
                spec: replace(world, loss=loss * (1 - self.quality)).changes(wrong, one, rng)
                for spec, loss in losses.items()
            }
            for run in range(len(right)):
                yield (
                    {
                        spec: (places >= lost[run, :, None]) & (places < right[run] + gained[run, :, None])
                        for spec, (lost, gained) in counts.items()
                    },
                    places < right[run],
                )


def contests(
    qualities: Sequence[float] = (0.95, 0.99), correlations: Sequence[float] = (0.1, 0.3, 0.6)
) -> list[Contest]:
    """What both ways are compared in. Where all are `FAILING`, whatever is chosen breaks the promise.

    Single questions are there because bounds are exact for them: nothing hides how alpha is spent.
    """
    just = ((1.0,),) * FAMILIES
    made = [Contest(FAILING, just, quality, 0.0, "even", asked=1) for quality in (0.9, 0.95)]
    for quality, correlation, way in product(qualities, correlations, WAYS):
        world = (quality, correlation, way)
        made += [Contest(FAILING, just, *world), Contest(FAILING, ((1.0,) * 5,) * FAMILIES, *world)]
        made += [Contest(FAILING, just, *world, accuracy=0.9, gain=0.5)]
        made += [Contest("all answer as dense attention does", ((0.0,),) * FAMILIES, *world, accuracy=0.9)]
        for own, loss, cheaper in (*product((0.0,), (1.0, 2.0, 5.0), (4, 7)), (0.1, 5.0, 0), (0.1, 5.0, 7)):
            losses = [(loss,)] * FAMILIES
            losses[cheaper] = (own,)
            lost = f"loses {own:g} of what it may" if own else "does"
            made.append(
                Contest(f"one {lost}; {cheaper} cheaper ones lose {loss:g} times what they may", tuple(losses), *world)
            )
    return made


def compared(made: Sequence[Contest], runs: int, again: int, seed: int) -> dict[str, Any]:
    """How often something that fails is chosen, and how often something else, by both ways; JSON-ready.

    Contests in which more than alpha of the `runs` choose what fails are judged by `again` others; how many of those
    `exceed` alpha beyond chance is counted as in `errors`.
    """
    rows = []
    for number, contest in enumerate(made):
        rng = numpy.random.default_rng([seed, number])
        drawn, found = runs, contest.chosen(runs, rng)
        if any(_failing(one) > ALPHA * runs for one in found.values()):
            drawn, found = again, contest.chosen(again, rng)
        row: dict[str, Any] = {
            name: getattr(contest, name)
            for name in ("name", "quality", "correlation", "way", "accuracy", "gain", "asked")
        }
        row |= {"rungs": len(contest.losses[0]), "runs": drawn}
        for way, one in found.items():
            row[way] = {"failing": _failing(one), "passing": sum(one.values()) - _failing(one) - one[-1.0]}
        rows.append(row)
    limit = 0.01 / max(len(rows), 1)
    exceed = sum(row["screened"]["failing"] > int(binom.isf(limit, row["runs"], ALPHA)) for row in rows)
    return {"families": FAMILIES, "contests": len(rows), "exceed": exceed, "rows": rows}


def _failing(chosen: Counter[float]) -> int:
    return sum(times for loss, times in chosen.items() if loss >= 1)
