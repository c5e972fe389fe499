"""What a captured step spends on a policy's attention: all layers of Llama-3.1-8B's shape in turn, no weights.

Two caches in turn stand for all layers, so that short rows stay in the last-level cache: what is measured of them is
launches and waiting. Layers whose heads are all dense are left out, since vLLM's own kernel runs there. Buffers and
grids are bounded by `max_model_len`. Times of a whole graph, medians of interleaved replays; and of every kernel in it.
"""

from typing import Any

import torch

from saccade.adapters.vllm.cache_dtype import bounds_bytes
from saccade.adapters.vllm.worker.page_bounds import BlockBounds, PagedIndexes
from saccade.checkpoints.presets import read_config
from saccade.checkpoints.shape import shape_of
from saccade.decode.attend import attend
from saccade.decode.counters import Counters
from saccade.decode.state import DecodeState
from saccade.methods.policy import Policy
from saccade.types import KVView, Rows, Softmax, Workspace

from .caches import disordered
from .environment import environment
from .timing import Captured, Deadline, arguments, interleaved, kernels_of, write

SHAPE = "llama-3.1-8b"
BLOCK, BOUND = 16, 131_681
POLICIES = ("streaming", "tidal", "less_is_more", "quest", "resa:rectify=none")
POINTS = ((1, 16), (28, 16), (4, 4096), (1, 131_104), (4, 131_104))
"""Rows and their lengths; the longest are behind a prompt of 131,072 tokens, whose pages a program just holds."""
ROUNDS = 21
REPLAYS = 5


class Caches:
    """Rows of one length in two paged caches with room for bounds, blocks in disorder."""

    def __init__(self, rows: int, length: int, bound: int, device: torch.device) -> None:
        self.shape = shape_of(read_config(SHAPE))
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        generator = torch.Generator(device).manual_seed(rows + length)
        blocks, content = -(-length // BLOCK), heads * BLOCK * 2 * dim
        padded = content + bounds_bytes(BLOCK, BLOCK, heads, dim, 2) // 2
        strides = (padded, BLOCK * 2 * dim, 2 * dim, 1)
        integers = {"dtype": torch.int32, "device": device}
        self.caches = []
        for _ in range(2):
            memory = torch.randn((rows * blocks, padded), dtype=torch.bfloat16, device=device, generator=generator)
            self.caches.append(memory.as_strided((rows * blocks, heads, BLOCK, 2 * dim), strides))
        table = disordered(rows, blocks, -(-bound // BLOCK), generator)
        lengths, whole = torch.full((rows,), length, **integers), torch.zeros(rows, dtype=torch.bool, device=device)
        self.workspace = Workspace.of(rows, self.shape.query_heads, device)
        self.rows = Rows(table, torch.zeros(rows, **integers), lengths, bound, whole=whole)
        self.first_new = lengths - 1
        self.queries = torch.randn((2, rows, self.shape.query_heads, dim), dtype=torch.bfloat16, device=device)

    def view(self, layer: int) -> KVView:
        k, v = self.caches[layer % 2].transpose(1, 2).split(self.shape.head_dim, dim=-1)
        return KVView(k, v, self.rows)

    def bounds(self, layer: int, page: int) -> BlockBounds:
        return BlockBounds.behind(self.caches[layer % 2], BLOCK, self.shape.head_dim, page)


def step_of(spec: str, caches: Caches) -> Captured:
    """One token of every row through all layers, bounds of every page made first."""
    plan, indexes = Policy.from_spec(spec).plan(caches.shape), PagedIndexes()
    counters = Counters(caches.shape.layers, by_row=True)
    state = DecodeState(plan, counters, exhaustive_is_dense=False, indexes=indexes, workspace=caches.workspace)
    page = None if plan.selector is None else plan.selector.bounds_page
    refreshing = plan.refreshing if page is not None else frozenset()
    for layer in refreshing:
        indexes.layers[layer] = bounds = caches.bounds(layer, page or 1)
        bounds.update(caches.view(layer), torch.zeros_like(caches.first_new), caches.rows.max_len)

    def step() -> None:
        state.begin(0)
        for layer in range(caches.shape.layers):
            if plan.roles.passive[layer]:
                state.passed(layer, caches.rows)
                continue
            kv = caches.view(layer)
            if layer in refreshing:
                indexes.layers[layer].update(kv, caches.first_new, 1)
            attend(state, layer, caches.queries[layer % 2], kv, Softmax(caches.shape.head_dim**-0.5))

    return Captured([step], caches.first_new.device)


def main() -> None:
    parser = arguments(__doc__, 120)
    parser.add_argument("--policy", action="append")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deadline, points, bound = Deadline(given.seconds), POINTS, BOUND
    if given.smoke:
        points, bound = ((2, 20), (1, 4096)), 4200
    results: dict[str, Any] = {"environment": environment(given.smoke), "shape": SHAPE, "bound": bound}
    results |= {"rows": [], "left_out": []}
    for rows, length in points:
        facts = {"rows": rows, "length": length}
        if deadline.left < 15:
            results["left_out"].append({**facts, "reason": "no time was left"})
            continue
        caches = Caches(rows, length, bound, device)
        steps = {spec: step_of(spec, caches) for spec in given.policy or POLICIES}
        for spec, times in interleaved(steps, rounds=2 if given.smoke else ROUNDS, seconds=deadline.left / 4).items():
            found = kernels_of(steps[spec].run, REPLAYS) if device.type == "cuda" else {}
            results["rows"].append({**facts, "policy": spec, **times, "kernels": found})
        write(given.file, results)
        del caches, steps


if __name__ == "__main__":
    main()
