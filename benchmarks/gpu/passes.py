"""A dense pass of a few tokens beside one dense token: python -m benchmarks.gpu.passes FILE [--candidates]

What rectification pays for every 32 tokens, against what a decoding step reads anyway. Both are our own kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.dense_pass import triton as kernel
from saccade.kernels.dense_pass.api import dense_pass
from saccade.kernels.dense_pass.triton import Tuning

from .caches import Cell, Heads
from .environment import environment
from .timing import Captured, bandwidth, interleaved, reason, relative_error, write

CANDIDATES = (
    *(Tuning(64, 64, 4, 3, resident) for resident in (1, 2, 4)),
    *(Tuning(64, 32, 4, stages, resident) for stages in (3, 4) for resident in (2, 3)),
    *(Tuning(128, 64, 8, 3, resident) for resident in (1, 2)),
    Tuning(128, 32, 8, 4, 2),
    Tuning(32, 64, 4, 3, 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=33, help="of a pass: those that are run again and the step's own")
    parser.add_argument("--heads", default="32x8x128,32x4x128", help="query heads x KV heads x head dim")
    parser.add_argument("--points", default="131072x1,131072x4,32768x1,32768x8", help="context x batch")
    parser.add_argument("--candidates", action="store_true", help="try other constants of the kernel, too")
    given = parser.parse_args()
    device = torch.device("cuda")
    results: dict[str, Any] = {"environment": environment(False), "tokens": given.tokens, "points": []}
    results["bandwidth"] = bandwidth(device, 2048)
    for heads in (Heads(*map(int, sizes.split("x"))) for sizes in given.heads.split(",")):
        for point in given.points.split(","):
            context, batch = map(int, point.split("x"))
            found = {"heads": [heads.query, heads.kv, heads.dim], "context": context, "batch": batch}
            results["points"].append({**found, **measured(Cell(context, batch, heads, torch.bfloat16, device), given)})
            write(given.file, results)
            print(results["points"][-1], flush=True)


def measured(cell: Cell, given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a layer, and how far the pass is from float64."""
    heads, count = cell.heads, given.tokens
    shape = (cell.batch, heads.query, count, heads.dim)
    q = torch.randn(shape, dtype=torch.bfloat16, device=cell.device, generator=cell.generator)
    copies = range(len(cell.caches))

    def each(call: Callable[[int], Any]) -> Captured:
        return Captured([lambda number=number: call(number) for number in copies], cell.device)

    variants = {
        "one dense token": each(lambda n: dense_decode_scores(cell.query(n), cell.view(n), scale=heads.scale)),
        "pass": each(lambda n: dense_pass(q, cell.view(n), scale=heads.scale, implementation="triton")),
        "torch, masked": each(lambda n: masked(q, *cell.caches[n], heads.scale)),
    }
    chosen, failed = kernel.tuning, {}
    for candidate in CANDIDATES if given.candidates else ():
        kernel.tuning = lambda *_, made=candidate: made
        try:
            variants[str(tuple(candidate))] = each(
                lambda n: dense_pass(q, cell.view(n), scale=heads.scale, implementation="triton")
            )
        except Exception as error:  # one that does not fit is a result too
            failed[str(tuple(candidate))] = reason(error)
    kernel.tuning = chosen
    out = dense_pass(q[:1], first_row(cell), scale=heads.scale, implementation="triton")
    return {
        "chosen": tuple(chosen(heads.query // heads.kv * count, heads.dim, 2)),
        "error": relative_error(out[0], expected(q[0], *cell.caches[0], heads.scale)),
        "times": interleaved(variants, rounds=20, seconds=30),
        "failed": failed,
    }


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
        logits = (q[head].double() @ own[0].T * scale).masked_fill(later, -torch.inf)
        found.append(logits.softmax(-1) @ own[1])
    return torch.stack(found, dim=1)


if __name__ == "__main__":
    main()
