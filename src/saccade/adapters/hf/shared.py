"""Rows that share texts: each walks some tokens, as if the cache held those before it alone, densely read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from ...plans.plan import Plan
from ...types import Rows
from .session import lasting
from .support import cached

PAGE = 16
"""Tokens of a storage page; of the one that a row begins in it has a copy."""


class SharedLayer(DynamicLayer):
    """Keys and values `[pages, Hkv, page, d]` of one layer; a row writes into its own pages alone."""

    def __init__(self, keys: Tensor, values: Tensor, shared: SharedRows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.keys, self.values, self._shared = keys, values, shared
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        own, places = self._shared.own, self._shared.places
        assert self.keys is not None and self.values is not None, "it was made with both"
        self.keys[own, :, places], self.values[own, :, places] = key_states[:, :, 0], value_states[:, :, 0]
        return self.keys, self.values

    def get_seq_length(self, *args: Any) -> int:
        return self._shared.rows.max_len - 1

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return self._shared.rows.max_len, 0


class SharedRows(Cache):
    """The cache of a batch of decode steps, each row's on what dense attention has left of a text and on its own steps.

    Who begins anew leaves nothing behind: rows write into places that every walk writes anew.

    Args:
        layers: by number, keys and values `[pages, Hkv, page, d]`.
        fed: what rows are fed up to their own token and behind it, int64 `[B, N]`; behind a row's end anything.
        rows: where their tokens lie, from the last one on in pages of the row's own.

    Attributes:
        plan, levels: under which they decode, whatever the attached run's is, and delimiter levels where it reads text.
    """

    plan: Plan
    levels: Sequence[int] | None = None

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], fed: Tensor, rows: Rows) -> None:
        self.rows, self.fed, self._pool = rows, fed, layers
        last = (rows.seq_lens - 1).long()
        page = layers[0][0].shape[2]
        self.own = rows.page_table.gather(1, (last // page)[:, None])[:, 0].long()
        self.places = last % page
        super().__init__(layers=[SharedLayer(keys, values, self) for keys, values in layers])

    @classmethod
    def joined(cls, texts: Sequence[SharedRows]) -> SharedRows:
        """The rows of several texts as one batch."""
        if len(texts) == 1:
            return texts[0]
        layers, pages = [], [0, *accumulate(one._pool[0][0].shape[0] for one in texts)]
        for number in range(len(texts[0]._pool)):
            keys, values = (torch.cat([one._pool[number][side] for one in texts]) for side in (0, 1))
            layers.append((keys, values))
        tables = [one.rows.page_table + first for one, first in zip(texts, pages, strict=False)]
        lengths = [length for one in texts for _, length in one.rows.bounds or ()]
        rows = Rows.on_host(_as_wide(tables), [0] * len(lengths), lengths)
        return cls(layers, _as_wide([one.fed for one in texts]), rows)

    @property
    def ids(self) -> Tensor:
        """The token that each row decodes, int64 `[B, 1]`."""
        return self.fed.gather(1, self.positions)

    @property
    def positions(self) -> Tensor:
        """Of those tokens, int64 `[B, 1]`."""
        return (self.rows.seq_lens - 1).long()[:, None]

    def part(self, rows: Sequence[int], step: int = 0) -> SharedRows:
        """Some of the rows, by their numbers, so many tokens on, in the same pages."""
        every = self.rows
        lengths = [(every.bounds or ())[row][1] + step for row in rows]
        at = torch.tensor(rows, device=self.fed.device)
        return self._on(self.fed[at], Rows.on_host(every.page_table[at], [0] * len(lengths), lengths))

    def uncounted(self, steps: int = 1) -> SharedRows:
        """The same rows as their lengths are now on the device, which alone counts so many steps, all of one shape."""
        return self._on(self.fed, replace(self.rows, max_len=self.rows.max_len + steps - 1, bounds=None))

    def _on(self, fed: Tensor, rows: Rows) -> SharedRows:
        one = SharedRows(self._pool, fed, rows)
        one.plan, one.levels = self.plan, self.levels
        return one


class SharedTexts:
    """Texts of one length that a stock cache holds as rows, densely read, and what may follow them.

    Args:
        model: not attached.
        cache: dynamic; it is as it was after each call.
        tokens: of each text.
    """

    def __init__(self, model: Any, cache: Any, tokens: Sequence[Sequence[int]]) -> None:
        self._model, self._cache = model, cache
        self._tokens, self._followed = tokens, list[Sequence[Sequence[int]]]()
        self._tails: list[list[tuple[Tensor, Tensor]]] = []

    @lasting()
    def follow(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read densely what may follow each text, as many tokens; logits `[texts, n, V]` behind each of these."""
        common, count, device = len(self._tokens[0]), len(tokens[0]), self._model.device
        at = torch.arange(common, common + count, device=device)[None].expand(len(tokens), -1)
        inputs = {"position_ids": at, **cached(self._model, self._cache)}
        logits: Tensor = self._model(torch.tensor(tokens, device=device), **inputs).logits
        first = common - common % PAGE
        # A layer of ours writes what follows next into the same memory.
        tails = ((layer.keys[:, :, first:], layer.values[:, :, first:]) for layer in self._cache.layers)
        self._tails.append([(keys.clone(), values.clone()) for keys, values in tails])
        self._followed.append(tokens)
        for layer in self._cache.layers:
            layer.crop(-count)
        return logits

    @lasting()
    def rows(self, text: int, at: Sequence[Sequence[tuple[int, int]]]) -> SharedRows:
        """Rows of a text that begin at some tokens of each that followed, by their numbers in it, and take so many
        steps each."""
        common, page, device = len(self._tokens[0]), PAGE, self._model.device
        whole, first = common // page, common - common % page
        counts = [-(-(common - first + len(tokens[text])) // page) for tokens in self._followed]
        starts = [whole + sum(counts[:number]) for number in range(len(counts))]
        tables, lengths, copied, fed = list[Tensor](), list[int](), list[int](), list[Sequence[int]]()
        for number, (followed, chosen) in enumerate(zip(self._followed, at, strict=True)):
            for place, steps in chosen:
                before, apiece = (common + place - first) // page, (page + steps - 2) // page + 1
                own = whole + sum(counts) + len(copied)
                # Behind its copy a row has pages that are empty, whatever else is copied there.
                copied += [starts[number] - whole + before] * apiece
                pages = [*range(whole), *range(starts[number], starts[number] + before), *range(own, own + apiece)]
                tables.append(torch.tensor(pages, dtype=torch.int32, device=device)[None])
                lengths.append(common + place + 1)
                fed.append(followed[text])
        behind = [0] * max(steps for chosen in at for _, steps in chosen)
        ids = torch.tensor([(*self._tokens[text], *followed, *behind) for followed in fed], device=device)
        layers = []
        for number, layer in enumerate(self._cache.layers):
            pools = []
            for side, held in enumerate((layer.keys, layer.values)):
                tails = torch.cat([self._paged(one[number][side][text]) for one in self._tails])
                pools.append(torch.cat((self._paged(held[text, :, :first]), tails, tails[copied])))
            layers.append((pools[0], pools[1]))
        return SharedRows(layers, ids, Rows.on_host(_as_wide(tables), [0] * len(lengths), lengths))

    def _paged(self, held: Tensor) -> Tensor:
        """Keys or values `[Hkv, n, d]` as pages `[n / page, Hkv, page, d]`, the last one filled up with zeros."""
        heads, count, width = held.shape
        filled = pad(held, (0, 0, 0, -count % PAGE))
        return filled.view(heads, -1, PAGE, width).transpose(0, 1).contiguous()


def _as_wide(tables: Sequence[Tensor]) -> Tensor:
    """Tables one below the other, filled up with zeros on the right."""
    width = max(table.shape[1] for table in tables)
    return torch.cat([pad(table, (0, width - table.shape[1])) for table in tables])
