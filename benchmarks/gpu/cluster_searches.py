"""One layer's search of the cluster index: python -m benchmarks.gpu.cluster_searches FILE [--candidates] [--smoke]

Rows of one length in a tree with room for `max_model_len`. Times of a graph of such searches, whose index stays in the
last-level cache where it fits; and of each kernel, with that cache emptied before every search, as a model's weights
do. Other constants of the kernels must find the same sets, and so must another version of them: `sets` is their digest.

    python3 -m benchmarks.gpu.cluster_searches searches.json [--policy SPEC] [--set RIVALS=32,PART=512]
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from saccade.kernels._triton.refusals import interpreting
from saccade.types import Selection

from .captured import BOUND, kernel_times
from .environment import environment
from .planting import POLICY, Planting
from .timing import Captured, Deadline, interleaved, reason, write

POINTS = "32768x1,32768x8,131072x1,131072x4,131072x8"
"""Shorter rows first: what is taken in stays."""
CANDIDATES = (
    {"WARPS": 2},
    {"WARPS": 8},
    {"PART": 256},
    {"PART": 1024},
    {"UNITS_PART": 512},
    {"UNITS_PART": 2048},
    {"SPARE": 2},
    {"SPARE": 16},
    {"RANKED": 128, "RIVALS": 16},
    {"RIVALS": 16},
    {"RIVALS": 64},
    {"MEMBERS": 4},
    {"UNITS": 8},
    {"UNITS": 32},
    {"CANDIDATES": 16},
    {"PROGRAMS": 1024},
    {"PROGRAMS": 4096},
)
"""Constants of the kernels, one after the other."""
SEARCHES = 20


def searched(made: Planting, rows: int, length: int, constants: dict[str, int]) -> Callable[[], Selection]:
    """A search by kernels with other constants, which a graph remembers."""
    search = made.searching(rows, length)
    if made.device.type != "cuda" and not interpreting():
        return search

    from saccade.kernels.cluster_search import triton as kernel

    def changed() -> Selection:
        shipped = {name: getattr(kernel, name) for name in constants}
        try:
            vars(kernel).update(constants)
            return search()
        finally:
            vars(kernel).update(shipped)

    return changed


def measured(made: Planting, rows: int, length: int, tried: list[dict[str, int]], deadline: Deadline) -> dict[str, Any]:
    """Milliseconds of a search by the constants that are shipped and by others, and whether these find the same."""
    wanted = searched(made, rows, length, {})()
    variants, same, failed = dict[str, Captured](), dict[str, bool](), dict[str, str]()
    for constants in ({}, *tried):
        name = ",".join(f"{key}={value}" for key, value in constants.items()) or "shipped"
        if constants and deadline.left < 15:
            failed[name] = "no time was left"
            continue
        search = searched(made, rows, length, constants)
        try:
            found = search()
            same[name] = found.ids.equal(wanted.ids) and found.counts.equal(wanted.counts)
            variants[name] = Captured([search] * (SEARCHES if made.device.type == "cuda" else 1), made.device)
        except Exception as error:  # one that does not fit is a result too
            failed[name] = reason(error)
    times = interleaved(variants, rounds=15, seconds=2 if made.device.type == "cuda" else 0)
    kernels = kernel_times(lambda _: searched(made, rows, length, {})(), made.device)
    tokens, sets = wanted.counts.float().mean().item(), hashlib.sha256(wanted.ids.cpu().numpy().tobytes()).hexdigest()
    return {"tokens": tokens, "sets": sets, "times": times, "same": same, "failed": failed, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--policy", action="append", help=f"may be given more than once; not given: {POLICY}")
    parser.add_argument("--points", default=POINTS, help="context x batch, shorter contexts first")
    parser.add_argument("--candidates", action="store_true", help="try other constants of the kernels, too")
    parser.add_argument("--set", action="append", default=[], help="constants to try together, NAME=NUMBER,...")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() or not given.smoke else "cpu")
    bound = 3100 if given.smoke else BOUND
    points = [
        tuple(map(int, point.split("x"))) for point in ("2300x1,3000x2" if given.smoke else given.points).split(",")
    ]
    chosen = [
        {name: int(number) for name, _, number in (one.partition("=") for one in text.split(","))} for text in given.set
    ]
    tried = [*(CANDIDATES if given.candidates else ()), *chosen]
    deadline, most = Deadline(given.seconds), max(rows for _, rows in points)
    results: dict[str, Any] = {"environment": environment(given.smoke), "bound": bound, "points": [], "left_out": []}
    for policy in given.policy or (POLICY,):
        made, standing = Planting(most, bound, 3, device, policy), 0
        for length, rows in points:
            facts = {"policy": policy, "rows": rows, "length": length}
            if deadline.left < 8:
                results["left_out"].append({**facts, "reason": "no time was left"})
                continue
            start = time.perf_counter()
            if length > standing:
                made.take_in(dict.fromkeys(range(most), length))
                standing = length
            facts["planting_seconds"] = round(time.perf_counter() - start, 1)
            results["points"].append({**facts, **measured(made, rows, length, tried, deadline)})
            write(given.file, results)
            print(results["points"][-1], flush=True)
        del made


if __name__ == "__main__":
    main()
