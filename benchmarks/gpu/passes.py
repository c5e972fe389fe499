"""A dense pass of a few tokens beside one dense token: python -m benchmarks.gpu.passes FILE [--candidates] [--smoke]

What rectification pays for every 32 tokens, against what a decoding step reads anyway, and against what it does under
`resa`: which share of attention's time is the pass (ReSA, figure 6). All are our own kernels, captured as graphs.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.kernels._triton.plan import Tuning
from saccade.kernels._triton.refusals import interpreting
from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.dense_pass import triton as kernel
from saccade.kernels.dense_pass.api import dense_pass
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.methods.policy import Policy
from saccade.selection.index import NewTokens
from saccade.types import ModelShape, Selection, Softmax

from .caches import Cell, Heads, sparse_oracle
from .environment import environment
from .timing import Captured, bandwidth, interleaved, reason, relative_error, write

POLICY = "resa"

CANDIDATES = (
    *((64, Tuning(64, 4, 3, resident)) for resident in (1, 2, 4)),
    *((64, Tuning(32, 4, stages, resident)) for stages in (3, 4) for resident in (2, 3)),
    *((128, Tuning(64, 8, 3, resident)) for resident in (1, 2)),
    (128, Tuning(32, 8, 4, 2)),
    (32, Tuning(64, 4, 3, 2)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=33, help="of a pass: those that are run again and the step's own")
    parser.add_argument("--heads", default="32x8x128,32x4x128", help="query heads x KV heads x head dim")
    parser.add_argument("--points", default="131072x1,131072x4,32768x1,32768x8", help="context x batch")
    parser.add_argument("--candidates", action="store_true", help="try other constants of the kernel, too")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    given = parser.parse_args()
    if given.smoke:
        given.heads, given.points, given.tokens = "8x2x64", "512x2,600x1", 9
    device = torch.device("cuda" if torch.cuda.is_available() or not given.smoke else "cpu")
    results: dict[str, Any] = {"environment": environment(given.smoke), "tokens": given.tokens, "points": []}
    results["bandwidth"] = bandwidth(device, 16 if given.smoke else 2048)
    for heads in (Heads(*map(int, sizes.split("x"))) for sizes in given.heads.split(",")):
        for point in given.points.split(","):
            context, batch = map(int, point.split("x"))
            found = {"heads": [heads.query, heads.kv, heads.dim], "context": context, "batch": batch}
            # Triton's interpreter knows no bfloat16.
            dtype = torch.float32 if given.smoke else torch.bfloat16
            results["points"].append({**found, **measured(Cell(context, batch, heads, dtype, device), given)})
            write(given.file, results)
            print(results["points"][-1], flush=True)


def measured(cell: Cell, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a layer, and how far the pass is from float64."""
    heads, count = cell.heads, given.tokens
    shape = (cell.batch, heads.query, count, heads.dim)
    q = torch.randn(shape, dtype=cell.query(0).dtype, device=cell.device, generator=cell.generator)
    copies = range(len(cell.caches))

    def each(call: Callable[[int], Any], calls: int = len(copies)) -> Captured:
        return Captured([lambda number=number: call(number) for number in range(calls)], cell.device)

    # Nobody's steps run in Triton's interpreter, but a rehearsal may.
    ours = "triton" if cell.device.type == "cuda" or interpreting() else "auto"
    step = SparseStep(cell, count)
    variants = {
        "one dense token": each(lambda n: dense_decode_scores(cell.query(n), cell.view(n), Softmax(heads.scale))),
        "pass": each(lambda n: dense_pass(q, cell.view(n), Softmax(heads.scale), implementation=ours)),
        "torch, masked": each(lambda n: masked(q, *cell.caches[n], heads.scale)),
        "estimation": each(step.choose, step.calls),
        "attention": each(step.attend, step.calls),
        "bounds of a pass": each(step.rewrite, step.calls),
    }
    chosen, failed = kernel.tuning, {}
    for candidate in CANDIDATES if given.candidates else ():
        kernel.tuning = lambda *_, made=candidate: made
        name = str((candidate[0], *astuple(candidate[1])))
        try:
            variants[name] = each(lambda n: dense_pass(q, cell.view(n), Softmax(heads.scale), implementation=ours))
        except Exception as error:  # one that does not fit is a result too
            failed[name] = reason(error)
    kernel.tuning = chosen
    tile, sizes = chosen(heads.query // heads.kv * count, heads.dim, q.element_size())
    out = dense_pass(q[:1], first_row(cell), Softmax(heads.scale), implementation=ours)
    times = interleaved(variants, rounds=20, seconds=30)
    return {
        "chosen": (tile, *astuple(sizes)),
        "error": relative_error(out[0], expected(q[0], *cell.caches[0], heads.scale)),
        "sparse_error": step.error(),
        "times": times,
        "rectified": period({name: figures["ms"] for name, figures in times.items()}, count - 1),
        "failed": failed,
    }


def period(ms: dict[str, float], every: int) -> dict[str, Any]:
    """Of `every` sparse steps of a layer and the pass behind them: milliseconds, and the pass's share 0..1 of them.

    `dense_ms`: of as many tokens, one by one, by dense attention; `share_by_torch`: if torch's attention ran the pass.
    """
    sparse, dense = every * (ms["estimation"] + ms["attention"]), (every + 1) * ms["one dense token"]
    ours, by_torch = (ms[kernel] + ms["bounds of a pass"] for kernel in ("pass", "torch, masked"))
    return {
        "policy": POLICY,
        "every": every,
        "ms": sparse + ours,
        "share": ours / (sparse + ours),
        "share_by_torch": by_torch / (sparse + by_torch),
        "dense_ms": dense,
        "speedup": dense / (sparse + ours),
    }


class SparseStep:
    """What a layer does under `resa` for one token: bounds and scores of pages, sets, attention to them.

    Calls have queries and bounds of their own, so that together they read more than the last-level cache holds.
    """

    def __init__(self, cell: Cell, count: int) -> None:
        heads, rows = cell.heads, cell.rows
        shape = ModelShape(layers=1, query_heads=heads.query, kv_heads=heads.kv, head_dim=heads.dim)
        selector = Policy.from_spec(POLICY).plan(shape).selector
        assert selector is not None, "it chooses pages"
        self._cell, self._selector = cell, selector
        self._new, self._again = NewTokens(rows, 1), NewTokens(rows, count)
        index = selector.new_index(cell.view(0))
        assert index is not None, "bounds of pages"
        index.update(cell.view(0), NewTokens(rows, rows.max_len))
        self.calls = cell.calls(min(2 * index.nbytes, cell.kv_bytes))
        self._indexes = [copy.deepcopy(index) for _ in range(self.calls)]
        size = (cell.batch, heads.query, heads.dim)
        make = {"dtype": cell.query(0).dtype, "device": cell.device, "generator": cell.generator}
        self._queries = [torch.randn(size, **make) for _ in range(self.calls)]
        self._sets = [self.choose(number) for number in range(self.calls)]

    def choose(self, number: int) -> Selection:
        view, index = self._cell.view(number), self._indexes[number]
        index.update(view, self._new)
        return self._selector.select(self._queries[number], view, index, None, self._cell.heads.scale)

    def attend(self, number: int) -> Tensor:
        return sparse_decode(
            self._queries[number], self._cell.view(number), self._sets[number], Softmax(self._cell.heads.scale)
        )

    def rewrite(self, number: int) -> None:
        """Of the pages that a pass has touched."""
        self._indexes[number].update(self._cell.view(number), self._again)

    def error(self) -> float:
        """Of attention to the first sets, against float64."""
        exact = sparse_oracle(self._queries[0], *self._cell.caches[0], self._sets[0], self._cell.heads.scale)
        return relative_error(self.attend(0), exact)


def first_row(cell: Cell) -> Any:
    return cell.view(0).picked([0])


def masked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """By torch's own attention, as it was before there was a kernel: a group's heads are queries of one."""
    group, count, length = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    folded = q.reshape(q.shape[0], k.shape[1], group * count, q.shape[3])
    own = torch.arange(length - count, length, device=q.device)[:, None]
    seen = (torch.arange(length, device=q.device) <= own).repeat(group, 1)
    return scaled_dot_product_attention(folded, k, v, attn_mask=seen[None, None], scale=scale)


def expected(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The first row's pass in float64, `[n, Hq, d]`."""
    heads, count, _ = q.shape
    group, length = heads // k.shape[1], k.shape[2]
    later = torch.arange(length, device=q.device) > torch.arange(length - count, length, device=q.device)[:, None]
    found = []
    for head in range(heads):
        own = k[0, head // group].double(), v[0, head // group].double()
        found.append((q[head].double() @ own[0].T * scale).masked_fill(later, -torch.inf).softmax(-1) @ own[1])
    return torch.stack(found, dim=1)


if __name__ == "__main__":
    main()
