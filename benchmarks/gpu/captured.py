"""Kernels of a captured decoding step: buffers and grids are bounded by `max_model_len`, however short its rows are.

Times are the device's own, per kernel, with the last-level cache emptied before every call: a model's weights leave
nothing of a layer in it. Sets of one size, a paged cache with pages in disorder, the shape of Llama-3.1-8B's layers.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.selection.rules.rank_union import RankUnion
from saccade.selection.rules.top_k import TopK
from saccade.types import KVView, Rows, Selection, Softmax, Workspace

from .caches import Heads, disordered
from .timing import AHEAD, Deadline, arguments, kernels_of, write

PAGE = 16
BUDGET = 2048
BOUND = 131_681
POINTS = ((28, 16), (28, 2048), (28, 2100), (28, 16_384), (4, 16), (4, 2100), (4, 131_072), (1, 131_072))
"""Rows and their lengths."""
CALLS = 10
EMPTIED = 256 * 2**20
"""Bytes that are written between calls, several times the last-level cache."""


class Step:
    """Rows of one length in a paged cache, two caches in turn; `longest`: of the last row, which opted out."""

    def __init__(self, rows: int, length: int, bound: int, device: torch.device, longest: int | None = None) -> None:
        heads, integers = Heads(), {"dtype": torch.int32, "device": device}
        generator = torch.Generator(device).manual_seed(rows + length)
        pages = -(-(longest or length) // PAGE)
        shape = (rows * pages, 2, PAGE, heads.kv, heads.dim)
        self.caches = [torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2)]
        table = disordered(rows, pages, -(-bound // PAGE), generator)
        lengths = torch.full((rows,), length, **integers)
        whole = torch.zeros(rows, dtype=torch.bool, device=device)
        if longest is not None:
            lengths[-1], whole[-1] = longest, True
        self.workspace = Workspace.of(rows, heads.query, device)
        self.rows = Rows(table, torch.zeros(rows, **integers), lengths, bound, whole=whole)
        self.query = torch.randn((rows, heads.query, heads.dim), dtype=torch.bfloat16, device=device)
        self.scores = {groups: torch.randn((rows, groups, bound), device=device) for groups in (heads.kv, heads.query)}
        self.selection = self._sets(length, heads.kv, generator)

    def view(self, number: int) -> KVView:
        cache = self.caches[number % 2]
        return KVView(cache[:, 0], cache[:, 1], self.rows)

    def _sets(self, length: int, groups: int, generator: torch.Generator) -> Selection:
        """Random tokens in order, all where they fit; as wide a buffer whatever their number."""
        device, size = self.query.device, min(BUDGET, length)
        shape = (self.rows.batch, groups)
        chances = torch.rand((*shape, length), device=device, generator=generator)
        ids = torch.full((*shape, BUDGET), -1, dtype=torch.int32, device=device)
        ids[..., :size] = chances.topk(size, dim=-1).indices.sort(dim=-1).values
        return Selection(ids, torch.full(shape, size, dtype=torch.int32, device=device))


def calls_of(step: Step) -> dict[str, Callable[[int], Any]]:
    """What a layer does, by name; call number i."""
    scale, heads, bare = Heads().dim ** -0.5, Heads(), step.rows
    return {
        "attention to sets": lambda i: sparse_decode(
            step.query, step.view(i), step.selection, Softmax(scale), workspace=step.workspace
        ),
        "dense attention that keeps scores": lambda i: dense_decode_scores(
            step.query, step.view(i), Softmax(scale), pooling="max"
        ),
        "top-k per KV head": lambda _: TopK(BUDGET).choose(step.scores[heads.kv], bare, 1, scale),
        "union of query heads": lambda _: RankUnion(BUDGET, 4, 0.25).choose(step.scores[heads.query], bare, 1, scale),
    }


def kernel_times(call: Callable[[int], Any], device: torch.device) -> dict[str, float]:
    """Microseconds of each kernel of a call, by name, without what empties the cache; none but on CUDA."""
    emptied = torch.empty(EMPTIED // 4 if device.type == "cuda" else 1, device=device)
    for number in range(2):
        call(number)
    if device.type != "cuda":
        return {}
    numbers = count()

    def from_memory() -> None:
        torch.neg(emptied, out=emptied)
        call(next(numbers))

    torch.cuda._sleep(AHEAD)
    return {name: spent for name, (_, spent) in kernels_of(from_memory, CALLS, but="neg").items()}


def main() -> None:
    given = arguments(__doc__, 120).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline, results = Deadline(given.seconds), dict[str, Any](bound=BOUND, budget=BUDGET, rows=[], left_out=[])
    points: list[tuple[int, int, int | None]] = [(*point, None) for point in POINTS]
    # One long row that opted out, among short ones.
    points.append((28, 2000, 65_536))
    bound = BOUND
    if given.smoke:
        points, bound = [(2, 16, None), (3, 2100, None), (2, 20, 90)], 2500
    for rows, length, longest in points:
        facts = {"rows": rows, "length": length, "longest": longest}
        if deadline.left < 5:
            results["left_out"].append({**facts, "reason": "no time was left"})
            continue
        step = Step(rows, length, bound, device, longest)
        for name, call in calls_of(step).items():
            kernels = kernel_times(call, device)
            results["rows"].append({**facts, "call": name, "us": round(sum(kernels.values()), 1), "kernels": kernels})
        write(given.file, results)
        del step


if __name__ == "__main__":
    main()
