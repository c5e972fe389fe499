"""Indexes of text beside steps that a graph holds: what they take in between them, by lengths that the host knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...decode.indexes import OwnIndexes
from ...selection.history import ALL_CLEAN
from ...types import KVView, Rows
from .session import Session, lasting


class Upkeep:
    """Brings the indexes of a cache up to each step whose lengths only the device knows.

    Args:
        session: of the cache.
        cache: a filled `StaticCache` of ours.
        starts: int32 `[B]`, each row's first real slot; read on the host.
    """

    def __init__(self, session: Session, cache: Any, starts: Tensor) -> None:
        indexes = session.state.indexes
        assert isinstance(indexes, OwnIndexes), "a cache here has indexes of its own"
        self._session, self._cache, self._indexes = session, cache, indexes
        self._first = starts.tolist()
        device = cache.layers[0].keys.device
        with lasting():
            self._starts = starts.to(device)
            self._table = torch.arange(len(self._first), dtype=torch.int32, device=device)[:, None]
            everyone, longest = [*range(len(self._first))], cache.layers[0].max_cache_len
            indexes.stay(lambda layer: self._seen(everyone, longest, (layer,))[layer], longest)
        self._layers, self._reserved = sorted(session.state.plan.refreshing), indexes.reserved

    @property
    def lost(self) -> bool:
        """Whether the indexes have left the memory that a graph knows."""
        return self._session.state.indexes is not self._indexes or self._indexes.reserved is not self._reserved

    def before(self, past: int, tokens: Tensor | None = None) -> None:
        """Take in what is to be, before a step behind `past` slots, whose `tokens` are int64 `[B, 1]`."""
        if self._reserved is None:
            return
        history, length = self._session.state.history, past + 1
        with lasting():
            if tokens is not None and history.levels is not None:
                history.record(past, 1, len(self._first), tokens, None)
            history.clean = ALL_CLEAN
            bounds = [(start, length - start) for start in self._first]
            self._indexes.follow(bounds, length, lambda rows: self._seen(rows, length, self._layers))

    def done(self) -> None:
        """Note that the step was a replay, which nobody else hears of."""
        self._indexes.ready()

    def _seen(self, rows: Sequence[int], length: int, layers: Sequence[int]) -> Mapping[int, KVView]:
        """The caches of some layers as some rows see them."""
        lengths = (length - self._starts).int()
        bounds = tuple((start, length - start) for start in self._first)
        caches = {layer: (self._cache.layers[layer].keys, self._cache.layers[layer].values) for layer in layers}
        where = Rows(self._table, self._starts, lengths, length, bounds)
        views = {
            layer: KVView(keys.transpose(1, 2), values.transpose(1, 2), where)
            for layer, (keys, values) in caches.items()
        }
        picked = views[layers[0]].picked([*rows]).rows
        return {layer: KVView(view.k, view.v, picked) for layer, view in views.items()}
