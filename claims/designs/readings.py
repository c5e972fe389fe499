"""Samples from the files of benchmarks: a text is a point, an arm what was timed there."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from saccade.errors import SaccadeError

from ..judging.claim import Sample

Content = Mapping[str, Any]
FEWEST = 100  # problems that long answers take


def decoding_steps(content: Content) -> list[Sample]:
    """`saccade bench decode`: milliseconds of a step, and their parts, at every context and batch."""
    return [_timed(_point(row), f"{row['runtime']} {row['policy']}", row) for row in content["rows"]]


def drafts(content: Content) -> list[Sample]:
    """`python -m benchmarks drafts`: milliseconds of a token, and drafts of a pass that stood; texts paced by all."""
    rows = {row["engine"]: row["each"] for row in content["rows"] if row.get("batch") == 1}
    if not rows:
        raise SaccadeError("drafts without the pace of single rows: --batch 1")
    known = [text for text in range(min(map(len, rows.values()))) if all(each[text][2] for each in rows.values())]
    return [
        Sample(f"text {text}", engine, {"ms": 1e3 * seconds / tokens, "accepted": tokens / steps - 1})
        for engine, each in rows.items()
        for text in known
        for tokens, seconds, steps in [each[text]]
    ]


def reasoning(content: Content) -> list[Sample]:
    """`python -m claims reasoning`: of every problem's answers the means; `ended@enough`: whether 100 qualified."""
    enough = {"ended@enough": float(content["qualified"] >= FEWEST)}
    names, rows = ("tokens", "ended", "right"), content["rows"]
    return [Sample(row["problem"], row["arm"], enough | {name: fmean(row[name]) for name in names}) for row in rows]


def passes(content: Content) -> list[Sample]:
    """`python -m benchmarks.gpu.passes`: the share of rectified decoding's attention that dense passes take."""
    return [
        Sample(
            f"{point['context']:,} × {point['batch']}, {point['heads'][0]} heads on {point['heads'][1]}",
            point["rectified"]["policy"],
            {"share": point["rectified"]["share"]},
        )
        for point in content["points"]
    ]


def kernels(content: Content) -> list[Sample]:
    """`python -m benchmarks.gpu.kernels`: milliseconds of an operation, and its speed over the best dense one."""
    samples = []
    for row in content["rows"]:
        if row["group"] in ("attention", "hybrid") and "ms" in row:
            dense_ms = row["speedup_over_best_dense"] * row["ms"]
            times = (row["ms_fast"], row["ms_slow"])
            values = {"ms": row["ms"], "speedup": row["speedup_over_best_dense"]}
            ends = {"ms": times, "speedup": (dense_ms / times[1], dense_ms / times[0])}
            samples.append(Sample(_point(row), f"{row['group']}: {row['variant']}", values, ends))
    return samples


def _point(row: Content) -> str:
    return f"{row['context']:,} × {row['batch']}"


def _timed(point: str, arm: str, row: Content) -> Sample:
    return Sample(point, arm, {"ms": row["ms_per_token"]}, {"ms": (row["ms_fast"], row["ms_slow"])})
