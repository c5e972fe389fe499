"""Random caches and sets of the shape that is measured, and what operations must give for them, in float64."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from saccade.types import KVView, Rows, Selection

ROTATED = 256 * 2**20
"""Bytes that calls in turn read together, several times the last-level cache."""


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer."""

    query: int = 32
    kv: int = 8
    dim: int = 128

    @property
    def scale(self) -> float:
        return self.dim**-0.5


def disordered(rows: int, pages: int, width: int, generator: torch.Generator) -> Tensor:
    """A page table int32 `[rows, width]`, each row's first pages anywhere, those behind them 0."""
    table = torch.zeros((rows, width), dtype=torch.int32, device=generator.device)
    table[:, :pages] = torch.randperm(rows * pages, device=generator.device, generator=generator).view(rows, pages)
    return table


class Cell:
    """A context and a batch: caches, queries and rows to call operations on.

    Attributes:
        caches: keys and values `[B, Hkv, T, d]`, as transformers keeps them; so many that they exceed the cache.
        queries: `[B, Hq, d]`, as many as caches.
    """

    def __init__(self, context: int, batch: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        self.context, self.batch, self.heads, self.device = context, batch, heads, device
        self.kv_bytes = 2 * batch * context * heads.kv * heads.dim * dtype.itemsize
        copies = min(max(1, -(-ROTATED // self.kv_bytes)), 8)
        generator = torch.Generator(device).manual_seed(context + batch)
        shape = (batch, heads.kv, context, heads.dim)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, dtype=dtype, device=device, generator=generator)

        self.caches = [(random(*shape), random(*shape)) for _ in range(copies)]
        self.queries = [random(batch, heads.query, heads.dim) for _ in range(copies)]
        integers = {"dtype": torch.int32, "device": device}
        self.rows = Rows(
            page_table=torch.arange(batch, **integers)[:, None],
            row_start=torch.zeros(batch, **integers),
            seq_lens=torch.full((batch,), context, **integers),
            max_len=context,
        )
        self.generator = generator

    @cached_property
    def expected(self) -> Tensor:
        """What attention to every token gives for the first query and cache."""
        return dense_oracle(self.queries[0], *self.caches[0], self.heads.scale)

    def view(self, number: int) -> KVView:
        k, v = self.caches[number % len(self.caches)]
        return KVView(k.transpose(1, 2), v.transpose(1, 2), self.rows)

    def query(self, number: int) -> Tensor:
        return self.queries[number % len(self.queries)]

    def selection(self, groups: int, tokens: int, unit: int = 1) -> Selection:
        """Random sets of so many tokens, each row's last unit among them: one unit from each of as many equal parts."""
        units = -(-self.context // unit)
        count = min(tokens // unit, units)
        edges = torch.arange(count + 1, device=self.device) * units // count
        shape = (self.batch, groups, count)
        picked = torch.rand(shape, dtype=torch.float64, device=self.device, generator=self.generator) * edges.diff()
        ids = (edges[:-1] + picked.long()).int()
        ids[..., -1] = units - 1
        return Selection(ids, torch.full(shape[:2], count, dtype=torch.int32, device=self.device), unit)

    def calls(self, read: float) -> int:
        """How many calls that read so many bytes each go through more memory than the caches hold."""
        return max(len(self.caches), min(16, int(-(-ROTATED // max(read, 1)))))


def dense_oracle(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention to every token, float64 `[B, Hq, d]`."""
    rows = []
    for row in range(q.shape[0]):
        folded = q[row].double().view(k.shape[1], -1, q.shape[-1])
        weights = (folded @ k[row].double().transpose(1, 2) * scale).softmax(-1)
        rows.append((weights @ v[row].double()).view(q.shape[1:]))
    return torch.stack(rows)


def sparse_oracle(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> Tensor:
    """Attention to the tokens of full sets, float64 `[B, Hq, d]`."""
    rows, offsets = [], torch.arange(selection.unit, device=q.device)
    for row in range(q.shape[0]):
        tokens = (selection.ids[row, :, :, None] * selection.unit + offsets).flatten(1).long()
        per_query = tokens.repeat_interleave(q.shape[1] // tokens.shape[0], dim=0)
        outputs = []
        for head in range(q.shape[1]):
            chosen = per_query[head][per_query[head] < k.shape[2]]
            kv_head = head * k.shape[1] // q.shape[1]
            weights = (k[row, kv_head, chosen].double() @ q[row, head].double() * scale).softmax(-1)
            outputs.append(weights @ v[row, kv_head, chosen].double())
        rows.append(torch.stack(outputs))
    return torch.stack(rows)


def score_oracle(q: Tensor, k: Tensor, pooled: bool) -> Tensor:
    """Raw scores, float64: `[B, Hkv, T]`, the largest of a group, or `[B, Hq, T]`."""
    rows = []
    for row in range(q.shape[0]):
        scores = q[row].double().view(k.shape[1], -1, q.shape[-1]) @ k[row].double().transpose(1, 2)
        rows.append(scores.amax(1) if pooled else scores.flatten(0, 1))
    return torch.stack(rows)


def bounds_oracle(k: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each page's keys; the context is a multiple of the page."""
    pages = k.unflatten(2, (-1, page))
    return pages.amin(3), pages.amax(3)


def page_score_oracle(q: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The largest bound of each group, float64 `[B, Hkv, P]`."""
    rows = []
    for row in range(q.shape[0]):
        heads = q[row].double().view(lower.shape[1], -1, q.shape[-1])
        low, high = lower[row].double().transpose(1, 2), upper[row].double().transpose(1, 2)
        rows.append((heads.clamp(min=0) @ high + heads.clamp(max=0) @ low).amax(1))
    return torch.stack(rows)
