"""Batches of random rows in the two layouts that adapters hand over, with NaN wherever no token lies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from saccade.types import KVView, Rows

Array = np.ndarray

LEVELS = (0, 0, 0, 0, 4, 4, 3, 2, 1)
"""Delimiter level of every id of the vocabulary that rows are drawn from: half of it delimits nothing."""


@dataclass
class Batch:
    """Rows of several layers in logical order: ``k[row][layer]`` is ``[Hkv, T, d]``, float64, exact in every dtype."""

    rng: np.random.Generator
    layers: int
    kv_heads: int
    group: int
    dim: int
    content: str
    k: list[list[Array]] = field(default_factory=list)
    v: list[list[Array]] = field(default_factory=list)
    q: list[list[Array]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    pads: list[int] = field(default_factory=list)  # slots before the first token where storage is paged
    blocks: Array | None = None

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        lengths: list[int],
        *,
        layers: int,
        kv_heads: int,
        group: int,
        dim: int = 8,
        content: str = "spread",
    ) -> Batch:
        """Rows that hold all but their last token; the first `step` adds it."""
        batch = cls(rng, layers, kv_heads, group, dim, content)
        for length in lengths:
            batch.k.append([batch._keys(length - 1) for _ in range(layers)])
            batch.v.append([batch._values(length - 1) for _ in range(layers)])
            batch.ids.append(batch._ids(length - 1))
            batch.pads.append(int(rng.integers(0, 11)))
        return batch

    def step(self) -> None:
        """One more token in every row, with its queries."""
        for row in range(len(self.k)):
            for layer in range(self.layers):
                at = self.k[row][layer].shape[1]
                self.k[row][layer] = np.concatenate((self.k[row][layer], self._keys(1, at)), axis=1)
                self.v[row][layer] = np.concatenate((self.v[row][layer], self._values(1)), axis=1)
            self.ids[row] += self._ids(1)
        self.q = [[self._grid((self.kv_heads * self.group, self.dim)) for _ in range(self.layers)] for _ in self.k]

    def crop(self, tokens: int) -> None:
        """Take the last `tokens` tokens off every row."""
        assert tokens <= min(self.lengths), "a row would keep its first tokens instead"
        for values in (*self.k, *self.v):
            values[:] = [layer[:, : layer.shape[1] - tokens] for layer in values]
        for ids in self.ids:
            del ids[len(ids) - tokens :]

    def extend(self, tokens: int) -> None:
        """As many tokens more in every row, that nobody decodes (a chunk of a dense pass)."""
        for _ in range(tokens):
            self.step()

    def select(self, rows: list[int]) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        self.k = [[layer.copy() for layer in self.k[row]] for row in rows]
        self.v = [[layer.copy() for layer in self.v[row]] for row in rows]
        self.ids = [list(self.ids[row]) for row in rows]
        self.pads = [self.pads[row] for row in rows]

    @property
    def lengths(self) -> list[int]:
        return [row[0].shape[1] for row in self.k]

    def levels(self, row: int) -> list[int]:
        """Delimiter level of every token of a row."""
        return [LEVELS[token] for token in self.ids[row]]

    def by_slot(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and position ids int64 ``[B, slots]``, with id 0 where no token lies."""
        slots = max(start + length for start, length in zip(starts, self.lengths, strict=True))
        fed = torch.zeros((2, len(self.ids), slots), dtype=torch.int64)
        for row, (start, ids) in enumerate(zip(starts, self.ids, strict=True)):
            fed[0, row, start : start + len(ids)] = torch.tensor(ids)
            fed[1, row, start : start + len(ids)] = torch.arange(len(ids))
        return fed[0], fed[1]

    def queries(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(np.stack([row[layer] for row in self.q]), dtype=dtype)

    def views(self, layout: str, dtype: torch.dtype) -> list[KVView]:
        """This step's cache of every layer, all sharing one `Rows`."""
        return self._padded(dtype) if layout == "padded" else self._paged(dtype)

    def _padded(self, dtype: torch.dtype) -> list[KVView]:
        """``[B, Hkv, capacity, d]``, left-padded, one page per row, as the transformers adapter keeps it."""
        used = max(self.lengths) + 2  # even the longest row is padded: `max_len` is only a bound
        starts = [used - length for length in self.lengths]
        table = torch.arange(len(self.k), dtype=torch.int32)[:, None]
        rows = Rows.on_host(table, starts, self.lengths, max_len=used)

        def storage(values: list[list[Array]], layer: int) -> torch.Tensor:
            buffer = torch.full((len(values), self.kv_heads, used + 5, self.dim), torch.nan, dtype=dtype)
            for row, start in enumerate(starts):
                buffer[row, :, start:used] = torch.tensor(values[row][layer])
            return buffer.transpose(1, 2)

        return [KVView(storage(self.k, layer), storage(self.v, layer), rows) for layer in range(self.layers)]

    def _paged(self, dtype: torch.dtype, page: int = 8) -> list[KVView]:
        """Shuffled storage pages, padding that is not page-aligned, and tables that end in a page of NaN."""
        starts = self.pads
        counts = [-(-(start + length) // page) for start, length in zip(starts, self.lengths, strict=True)]
        numbers = self.rng.permutation(sum(counts) + 1)
        table = np.full((len(self.k), max(counts) + 1), numbers[-1])
        for row, count in enumerate(counts):
            table[row, :count] = numbers[sum(counts[:row]) :][:count]
        tensor = torch.tensor(table, dtype=torch.int32)
        rows = Rows.on_host(tensor, starts, self.lengths)

        def storage(values: list[list[Array]], layer: int) -> torch.Tensor:
            pages = torch.full((len(numbers), page, self.kv_heads, self.dim), torch.nan, dtype=dtype)
            for row, start in enumerate(starts):
                slots = np.arange(start, start + self.lengths[row])
                pages[table[row, slots // page], slots % page] = torch.tensor(
                    values[row][layer], dtype=dtype
                ).transpose(0, 1)
            return pages

        return [KVView(storage(self.k, layer), storage(self.v, layer), rows) for layer in range(self.layers)]

    def _keys(self, tokens: int, at: int = 0) -> Array:
        shape = (self.kv_heads, tokens, self.dim)
        if self.content == "constant":
            return np.full(shape, 0.5)
        if self.content == "clustered":  # three different keys, so that nearly every cut falls on a tie
            pool = np.random.default_rng(7).integers(-16, 17, (3, self.dim)) / 16
            return pool[self.rng.integers(0, 3, shape[:2])]
        if self.content == "crossed":  # zero and four unit vectors of a plane, the same over four neighbours
            pool = np.zeros((5, self.dim))
            pool[1, 0], pool[2, 0], pool[3, 3], pool[4, 3] = 1, -1, 1, -1
            if self.blocks is None:
                self.blocks = self.rng.integers(0, 5, (self.kv_heads, 100))
            return pool[self.blocks[:, np.arange(at, at + tokens) // 4]]
        if self.content == "similar":  # all near one direction, so that decisions are close
            return np.linspace(1.75, 0, self.dim) + self.rng.integers(-4, 5, shape) / 16
        return self._grid(shape)

    def _ids(self, tokens: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, len(LEVELS), tokens)]

    def _values(self, tokens: int) -> Array:
        return self._grid((self.kv_heads, tokens, self.dim))

    def _grid(self, shape: tuple[int, ...]) -> Array:
        """Multiples of 1/16 in [-2, 2]: exact in bfloat16, and so are their products' sums in float32.

        A float32 score therefore equals the float64 one, and sets can be compared exactly, ties included.
        """
        return self.rng.integers(-32, 33, shape) / 16
