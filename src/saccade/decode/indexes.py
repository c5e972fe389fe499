"""Where a batch's indexes lie: one per layer, built at first use and kept up to date with the cache."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..plans.plan import Plan
from ..selection.history import TokenHistory
from ..selection.selector import Index, KeySizes, NewTokens, Reserved
from ..types import KVView, Rows


class Indexes(Protocol):
    """Indexes of one batch of sequences."""

    def begin(self, past: int) -> None:
        """Start a call on a cache of `past` slots: whatever was beyond them has been taken back."""
        ...

    def of(self, layer: int, kv: KVView) -> Index | None:
        """The layer's index, up to date with the cache; None if the policy keeps none there."""
        ...

    def permute(self, layer: int, rows: Tensor) -> None:
        """Let batch row `i` of a layer be what row `rows[i]` was."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def build_seconds(self) -> float: ...


class OwnIndexes:
    """Indexes that belong to one batch alone.

    Args:
        plan: whose selector makes them.
        history: what was fed, for indexes of text.

    Attributes:
        build_seconds: time that the first update of every layer took.
        update_seconds: time of the later ones; of a device's only what its host needs.
        reserved: memory that indexes do not leave, as long as their rows stay in order; None: they move as they grow.
    """

    def __init__(self, plan: Plan, history: TokenHistory) -> None:
        self._plan = plan
        self._history = history
        self._indexes: dict[int, Index] = {}
        self._covered: dict[int, int] = {}
        self._new: NewTokens | None = None
        self.reserved: Reserved | None = None
        self.build_seconds = self.update_seconds = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnIndexes:
        twin = OwnIndexes(self._plan, copy.deepcopy(self._history, memo))
        twin._indexes = copy.deepcopy(self._indexes, memo)
        twin._covered = dict(self._covered)
        twin.reserved = copy.deepcopy(self.reserved, memo)
        return twin

    def begin(self, past: int) -> None:
        for layer, covered in self._covered.items():
            self._covered[layer] = min(covered, past)

    def stay(self, seen: Callable[[int], KVView], longest: int) -> None:
        """Move indexes, if they can stay in one place, to memory for rows of at most `longest` tokens.

        What was taken in is taken in anew. `seen` gives a layer's cache.
        """
        selector = self._plan.selector
        if selector is None or not selector.stays or self.reserved is not None:
            return
        layers = sorted(self._plan.refreshing)
        kv = seen(layers[0])
        reserved = selector.reserve(layers, KeySizes.of(kv), kv.rows.batch, longest, self._history)
        assert reserved is not None, "it stays"
        self.reserved = reserved
        self._indexes.clear()
        self._indexes.update(reserved.layers)
        self._covered.clear()

    def follow(
        self,
        bounds: Sequence[tuple[int, int]],
        length: int,
        seen: Callable[[Sequence[int]], Mapping[int, KVView]],
    ) -> None:
        """Take in what a step whose lengths only the device knows will find; it does not do so itself.

        Args:
            bounds: starts and lengths of all rows, the step's token included.
            length: slots that are filled then.
            seen: the caches of all layers as some of the rows see them.
        """
        selector, reserved = self._plan.selector, self.reserved
        assert selector is not None and reserved is not None, "indexes that stay"
        new = max(length - min(self._covered.values(), default=0), 1)
        feeds = self._history.feeds(reserved.table, bounds, new, selector.stop)
        if feeds:
            reserved.table.bring(feeds)
        if reserved.stale:
            reserved.plant(seen)
        self._covered = dict.fromkeys(reserved.layers, length)

    def of(self, layer: int, kv: KVView) -> Index | None:
        layer = self._plan.sources.get(layer, layer)
        if self._plan.selector is None or layer not in self._plan.refreshing:
            return None
        index = self._indexes.get(layer)
        if index is None:
            index = self._plan.selector.new_index(kv, self._history)
            if index is None:
                return None
            self._indexes[layer] = index
        if self.reserved is not None and kv.rows.bounds is None:
            # It was followed before the step.
            return index
        length, covered = kv.rows.max_len, self._covered.get(layer, 0)
        if length != covered and (layer not in self._covered or self._completes(kv.rows, length - covered)):
            start = time.perf_counter()
            # A layer that shares it begins with a call's first token once another has come to the last one.
            index.update(kv, self._new_tokens(kv.rows, max(length - covered, 1)))
            if layer not in self._covered:
                # Once per layer and cache, so waiting for the device costs nothing that anybody would notice.
                if kv.k.is_cuda:
                    torch.cuda.synchronize(kv.k.device)
                self.build_seconds += time.perf_counter() - start
            else:
                self.update_seconds += time.perf_counter() - start
            self._covered[layer] = length
        return index

    def _completes(self, rows: Rows, new: int) -> bool:
        """Whether the last `new` tokens fill a unit of some row, so that an index has to know of them."""
        assert self._plan.selector is not None, "it has made the index"
        unit = self._plan.selector.granule
        if unit == 1 or rows.bounds is None:
            return True
        # The bound too: an index makes room for it.
        lengths = rows.max_len, *(length for _, length in rows.bounds)
        return any(length // unit > (length - new) // unit for length in lengths)

    def _new_tokens(self, rows: Rows, count: int) -> NewTokens:
        """One object for all layers of a step."""
        if self._new is None or self._new.rows is not rows or self._new.count != count:
            self._new = NewTokens(rows, count)
        return self._new

    def permute(self, layer: int, rows: Tensor) -> None:
        if layer in self._indexes:
            self._indexes[layer].permute(rows)
            self.reserved = None

    @property
    def nbytes(self) -> int:
        # A list: another thread may be building while this one asks.
        return self._history.nbytes + sum(index.nbytes for index in list(self._indexes.values()))
