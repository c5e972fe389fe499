"""Rows that share a text: each decodes one of its tokens as if the cache held those before it, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from ...decode.slots import Arrival, Slots
from ...errors import UnsupportedModelError
from ...plans.plan import Plan
from ...selection.index import Index, NewTokens
from ...selection.scorers.page_bounds import PageBounds
from ...text.history import TokenHistory
from ...types import KVView, Rows
from .session import lasting
from .support import cached

PAGE = 16
"""Tokens of a storage page, or the next multiple of a selection page: of its last page a row has a copy."""


class SharedLayer(DynamicLayer):
    """Keys and values `[pages, Hkv, page, d]` of one layer; a row writes into its own page alone."""

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
    """The cache of a batch of decode steps on one text, each on what dense attention has left of the tokens before it.

    A step under a policy leaves nothing behind: rows write into places that every step writes anew.

    Args:
        layers: by number, keys and values `[pages, Hkv, page, d]`.
        fed: what rows are fed up to their own token and behind it, int64 `[B, N]`.
        rows: where their tokens lie, the last in a page of the row's own.
        common: tokens that are the same for all rows.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], fed: Tensor, rows: Rows, common: int) -> None:
        self.rows, self.fed, self.common, self._pool = rows, fed, common, layers
        last = (rows.seq_lens - 1).long()
        page = layers[0][0].shape[2]
        self.own = rows.page_table.gather(1, (last // page)[:, None])[:, 0].long()
        self.places = last % page
        super().__init__(layers=[SharedLayer(keys, values, self) for keys, values in layers])
        self._bounds: dict[tuple[int, int], PageBounds] = {}

    @property
    def ids(self) -> Tensor:
        """The token that each row decodes, int64 `[B, 1]`."""
        return self.fed.gather(1, self.positions)

    @property
    def positions(self) -> Tensor:
        """Of those tokens, int64 `[B, 1]`."""
        return (self.rows.seq_lens - 1).long()[:, None]

    def view(self, layer: int) -> KVView:
        """A layer's cache as all rows see it."""
        keys, values = self._pool[layer]
        return KVView(keys.transpose(1, 2), values.transpose(1, 2), self.rows)

    def bounds(self, layer: int, page: int) -> PageBounds:
        """Bounds of a layer's pages of `page` tokens; of the text's they are kept, for whatever is fed."""
        kv, known = self.view(layer), self._bounds.get((layer, page))
        if known is None:
            shape = kv.k.shape[0], kv.kv_heads, kv.page // page, kv.head_dim
            lower, upper = kv.k.new_empty(shape), kv.k.new_empty(shape)
            known = self._bounds[layer, page] = PageBounds(lower, upper, page, self.rows.page_table)
            text = kv.picked([0])
            known_of_text = replace(known, table=text.rows.page_table)
            known_of_text.update(text, NewTokens(text.rows, text.rows.max_len))
        known.update(kv, NewTokens(self.rows, self.rows.max_len - self.common))
        return known

    def part(self, first: int, last: int) -> SharedRows:
        """Some of the rows, on the same pages."""
        told = self.rows
        bounds = None if told.bounds is None else told.bounds[first:last]
        longest = told.max_len if bounds is None else max(length for _, length in bounds)
        some = replace(
            told,
            page_table=told.page_table[first:last],
            row_start=told.row_start[first:last],
            seq_lens=told.seq_lens[first:last],
            max_len=longest,
            bounds=bounds,
        )
        return SharedRows(self._pool, self.fed[first:last], some, self.common)


class SharedIndexes:
    """Indexes of such rows: bounds of the text's pages are kept for all steps, an index of its own is made for one.

    Args:
        plan: whose selector they serve.
        cache: whose rows search.
        text: what the rows are fed, of whoever reads text.

    Raises:
        UnsupportedModelError: the plan's selector keeps something else beside a cache.
    """

    build_seconds = 0.0

    def __init__(self, plan: Plan, cache: SharedRows, text: TokenHistory) -> None:
        self._plan, self._cache, self._seen = plan, cache, dict[int, Index]()
        self._slots = self._taken_in(text) if plan.owns_index else None

    def begin(self, past: int, clean: int) -> None:
        self._seen.clear()

    def of(self, layer: int, kv: KVView) -> Index | None:
        layer = self._plan.sources.get(layer, layer)
        if layer not in self._plan.refreshing or self._plan.selector is None:
            return None
        if self._slots is not None:
            return self._slots.of(layer, kv)
        if layer not in self._seen:
            page = self._plan.bounds_page
            if page is not None:
                self._seen[layer] = self._cache.bounds(layer, page)
            elif self._plan.selector.new_index(kv) is not None:
                raise UnsupportedModelError("steps that share a text know page bounds and indexes in slots, no others")
        return self._seen.get(layer)

    def permute(self, rows: Tensor) -> None:
        raise UnsupportedModelError("rows that share a text stay in order")

    @property
    def nbytes(self) -> int:
        return 0 if self._slots is None else self._slots.nbytes

    def _taken_in(self, text: TokenHistory) -> Slots:
        """An index in slots, a row in each: what is the same for all is taken in once."""
        cache, common = self._cache, self._cache.common
        layers = sorted(self._plan.refreshing)

        def seen(rows: Sequence[int]) -> dict[int, KVView]:
            return {layer: cache.view(layer).picked([*rows]) for layer in layers}

        at = torch.arange(cache.fed.shape[1], device=cache.fed.device)[None]
        slots, batch = Slots(self._plan, text, slots=1), cache.rows.batch
        text.record(0, common, 1, cache.fed[:1, :common], at[:, :common])
        slots.follow([Arrival(0, common, common + 1, 0, common)], seen)
        everyone = torch.zeros(batch, dtype=torch.int64, device=cache.fed.device)
        text.permute(everyone)
        slots.permute(everyone)
        text.record(common, cache.fed.shape[1] - common, batch, cache.fed[:, common:], at[:, common:])
        lengths = [length for _, length in cache.rows.bounds or ()]
        slots.follow([Arrival(row, n - 1, n, common, n - 1) for row, n in enumerate(lengths)], seen)
        return slots


class SharedText:
    """A text that a stock cache holds for one row, densely read, and what may follow it.

    Args:
        model: not attached.
        cache: dynamic; it is as it was after each call.
        tokens: of the text.
        page: tokens of a storage page; a multiple of every selection page.
    """

    def __init__(self, model: Any, cache: Any, tokens: Sequence[int], page: int = PAGE) -> None:
        self._model, self._cache, self._page = model, cache, page
        self._tokens, self._followed = tuple(tokens), list[tuple[int, ...]]()
        self._tails: list[list[tuple[Tensor, Tensor]]] = []

    @lasting()
    def follow(self, tokens: Sequence[int]) -> Tensor:
        """Read what may follow densely; logits `[n, V]` behind each of these tokens."""
        common, count, device = len(self._tokens), len(tokens), self._model.device
        at = torch.arange(common, common + count, device=device)[None]
        inputs = {"position_ids": at, **cached(self._model, self._cache)}
        logits: Tensor = self._model(torch.tensor([tokens], device=device), **inputs).logits[0]
        first = common - common % self._page
        tail = [(layer.keys[0, :, first:], layer.values[0, :, first:]) for layer in self._cache.layers]
        self._tails.append([(self._paged(keys), self._paged(values)) for keys, values in tail])
        self._followed.append(tuple(tokens))
        for layer in self._cache.layers:
            layer.crop(-count)
        return logits

    @lasting()
    def rows(self, at: Sequence[Sequence[int]]) -> SharedRows:
        """Steps that decode some tokens of each that followed, by their numbers in it, ascending."""
        common, page, device = len(self._tokens), self._page, self._model.device
        whole, first = common // page, common - common % page
        counts = [tails[0][0].shape[0] for tails in self._tails]
        starts = [whole + sum(counts[:number]) for number in range(len(counts))]
        width = whole + max(counts)
        tables, lengths, copied, fed = list[list[int]](), list[int](), list[int](), list[tuple[int, ...]]()
        for number, (followed, chosen) in enumerate(zip(self._followed, at, strict=True)):
            for place in chosen:
                before = (common + place - first) // page
                copied.append(starts[number] - whole + before)
                own = whole + sum(counts) + len(tables)
                pages = [*range(whole), *range(starts[number], starts[number] + before), own]
                tables.append(pages + [0] * (width - len(pages)))
                lengths.append(common + place + 1)
                fed.append(followed)
        table = torch.tensor(tables, dtype=torch.int32, device=device)
        ids = torch.tensor([(*self._tokens, *followed) for followed in fed], device=device)
        layers = []
        for number, layer in enumerate(self._cache.layers):
            pools = []
            for side, held in enumerate((layer.keys, layer.values)):
                tails = torch.cat([one[number][side] for one in self._tails])
                pools.append(torch.cat((self._paged(held[0, :, :first]), tails, tails[copied])))
            layers.append((pools[0], pools[1]))
        return SharedRows(layers, ids, Rows.on_host(table, [0] * len(lengths), lengths), common)

    def _paged(self, held: Tensor) -> Tensor:
        """Keys or values `[Hkv, n, d]` as pages `[n / page, Hkv, page, d]`, the last one filled up with zeros."""
        heads, count, width = held.shape
        filled = pad(held, (0, 0, 0, -count % self._page))
        return filled.view(heads, -1, self._page, width).transpose(0, 1).contiguous()
