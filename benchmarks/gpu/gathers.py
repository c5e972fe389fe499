"""What attention to single tokens costs beside gathering the same rows, and beside reading as many bytes in a row.

As many layers as choose nothing themselves, a cache each, between products with weights that leave nothing of a layer
in the last-level cache; what the products take by themselves is taken off. In vLLM's layout: a token's heads together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import KVView, Rows, Selection, Softmax, Workspace

from .caches import Heads, disordered
from .captured import BOUND, BUDGET, PAGE
from .environment import environment
from .timing import Captured, Deadline, arguments, bandwidth, interleaved, write

POINTS = ((1, 131_072), (4, 131_072), (7, 131_072), (1, 32_768), (8, 32_768), (1, 16), (28, 16), (28, 2048))
"""Rows and their lengths."""
LAYERS = 28
BLOCK = 32
"""Rows of a cache that a program gathers; 16 and 64 were no faster on an H200."""
WEIGHTS = (14_336, 4096)


@triton.jit
def _gather(
    ids: tl.tensor, storage: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr, WORDS: tl.constexpr, LISTED: tl.constexpr
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(ids + places) if LISTED else places
    numbers = tl.load(storage + rows.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(numbers, axis=1), axis=0))


class Layers:
    """Rows of one length in paged caches, with a set of random tokens for each KV head."""

    def __init__(self, rows: int, length: int, bound: int, layers: int, device: torch.device) -> None:
        heads, pages, integers = Heads(), -(-length // PAGE), {"dtype": torch.int32, "device": device}
        generator = torch.Generator(device).manual_seed(rows + length)
        shape = (rows * pages, PAGE, heads.kv, 2 * heads.dim)
        some = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        self.caches = [some, *(some.clone() for _ in range(layers - 1))]
        table = disordered(rows, pages, -(-bound // PAGE), generator)
        lengths, self.workspace = torch.full((rows,), length, **integers), Workspace.of(rows, heads.query, device)
        whole = torch.zeros(rows, dtype=torch.bool, device=device)
        self.rows = Rows(table, torch.zeros(rows, **integers), lengths, bound, whole=whole)
        self.query = torch.randn((rows, heads.query, heads.dim), dtype=torch.bfloat16, device=device)
        size = min(BUDGET, length)
        chances = torch.rand((rows, heads.kv, length), device=device, generator=generator)
        tokens = chances.topk(size, dim=-1).indices.sort(dim=-1).values
        ids = torch.full((rows, heads.kv, BUDGET), -1, **integers)
        ids[..., :size] = tokens
        self.selection = Selection(ids, torch.full((rows, heads.kv), size, **integers))
        slots = table.long()[torch.arange(rows, device=device)[:, None, None], tokens // PAGE] * PAGE + tokens % PAGE
        self.places = (slots * heads.kv + torch.arange(heads.kv, device=device)[:, None]).int().flatten()
        self.sums = torch.empty(-(-len(self.places) // BLOCK), **integers)
        self.read = len(self.places) * 4 * heads.dim

    def attention(self, layer: int, workspace: Workspace | None) -> Tensor:
        k, v = self.caches[layer].split(Heads().dim, dim=-1)
        kv, softmax = KVView(k, v, self.rows), Softmax(Heads().scale)
        return sparse_decode(self.query, kv, self.selection, softmax, workspace=workspace)

    def gather(self, layer: int, listed: bool) -> Tensor:
        storage = self.caches[layer].view(-1, 2 * Heads().dim).view(torch.int32)
        if self.sums.device.type != "cuda":
            return storage[self.places if listed else slice(len(self.places))].sum()
        _gather[(len(self.sums),)](self.places, storage, self.sums, BLOCK=BLOCK, WORDS=storage.shape[1], LISTED=listed)
        return self.sums


def main() -> None:
    given = arguments(__doc__, 60).parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline, points, bound, layers, sizes = Deadline(given.seconds), POINTS, BOUND, LAYERS, WEIGHTS
    if given.smoke:
        points, bound, layers, sizes = ((2, 16), (1, 2100)), 2500, 2, (64, 32)
    weights = [torch.randn(sizes, dtype=torch.bfloat16, device=device) for _ in range(4)]
    results: dict[str, Any] = {"environment": environment(given.smoke), "budget": BUDGET, "bound": bound}
    results |= {"layers": layers, **bandwidth(device, 1 if given.smoke else 1024), "rows": [], "left_out": []}
    for rows, length in points:
        facts = {"rows": rows, "length": length}
        if deadline.left < 5:
            results["left_out"].append({**facts, "reason": "no time was left"})
            continue
        held, x = Layers(rows, length, bound, layers, device), torch.randn((rows, sizes[1]), device=device)
        for name, us in times(held, x.bfloat16(), weights, 2 if given.smoke else 15, deadline.left).items():
            share = held.read / us / 1e3 / results["copy_gb_s"]
            results["rows"].append({**facts, "variant": name, "us": us, "bytes": held.read, "share_of_copy": share})
        write(given.file, results)
        del held


def times(held: Layers, x: Tensor, weights: list[Tensor], rounds: int, seconds: float) -> dict[str, float]:
    """Microseconds of a layer by what it does, without the product in front of it."""
    calls: dict[str, Callable[[int], Any]] = {
        "nothing": lambda _: None,
        "attention": lambda layer: held.attention(layer, held.workspace),
        "attention, parts joined by another launch": lambda layer: held.attention(layer, None),
        "rows gathered": lambda layer: held.gather(layer, True),
        "as many bytes in a row": lambda layer: held.gather(layer, False),
    }

    def step_of(call: Callable[[int], Any]) -> Captured:
        def step() -> None:
            for layer in range(len(held.caches)):
                torch.mm(x, weights[layer % 4].T)
                call(layer)

        return Captured([step], held.sums.device)

    found = interleaved({name: step_of(call) for name, call in calls.items()}, rounds=rounds, seconds=seconds)
    bare = found.pop("nothing")["ms"]
    return {name: max(1e3 * (one["ms"] - bare) / len(held.caches), 1e-3) for name, one in found.items()}


if __name__ == "__main__":
    main()
