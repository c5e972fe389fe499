"""A finished `saccade tune --full`, whose texts are halved again and again: one half chooses, the other half scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy

from saccade.calibrate.promise import ALPHA, Families, Marks, Tables, cheapest, walk
from saccade.calibrate.target import LEDGER
from saccade.calibrate.tune import RESULTS
from saccade.errors import OutputError
from saccade.eval.output import read_lines


@dataclass(frozen=True, slots=True)
class Kept:
    """How often the promise held when one half of the texts chose and the other half scored.

    Attributes:
        chosen: how often each candidate was chosen; None: nothing passed, dense attention stays.
        broken: splits in which the chosen one missed the wanted ratio on the half that did not choose it.
        below: splits in which it misses that ratio on the whole table.
    """

    splits: int
    chosen: Mapping[str | None, int]
    broken: int
    below: int


def resampled(
    families: Families, tables: Tables, dense: Marks, costs: Mapping[str, float], quality: float, *,
    splits: int = 1000, seed: int = 0, alpha: float = ALPHA
) -> Kept:  # fmt: skip
    """Choose on one half of the texts and score on the other, again and again."""
    rng, chosen, broken, below = numpy.random.default_rng(seed), Counter[str | None](), 0, 0
    for _ in range(splits):
        order = rng.permutation(dense.shape[0])
        one, other = numpy.split(order, [len(order) // 2])
        verdicts = walk(families, {spec: table[one] for spec, table in tables.items()}, dense[one], quality, alpha)
        best = cheapest(verdicts, costs)
        chosen[best] += 1
        if best is not None:
            broken += bool(tables[best][other].sum() < quality * dense[other].sum())
            below += bool(tables[best].sum() < quality * dense.sum())
    return Kept(splits, chosen, broken, below)


def read_tables(folder: Path) -> tuple[dict[str, list[str]], dict[str, Marks], Marks, dict[str, float], float]:
    """What a finished `--full` run has left: families, answers by spec, dense attention's, bytes by spec, the quality.

    Raises an OutputError for a folder without such results.
    """
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        lines = read_lines(folder / LEDGER)[1:]
    except (OSError, ValueError) as error:
        raise OutputError(f"{str(folder)!r} holds no finished run of saccade tune: {error}") from error
    if not results["full"]:
        raise OutputError(f"{str(folder)!r} holds a run that left out what had no chance; run saccade tune --full")
    answers = {(line["spec"], line["problem"]): line["right"] for line in lines}
    members: dict[str, list[str]] = {}
    for row in results["rows"]:
        members.setdefault(row["family"], []).append(row["spec"])
    costs = {row["spec"]: row["bytes"] for row in results["rows"]}
    tables = {
        spec: numpy.array([answers[spec, number] for number in range(results["texts"])], dtype=bool)
        for spec in ("dense", *costs)
    }
    return members, tables, tables.pop("dense"), costs, results["quality"]
