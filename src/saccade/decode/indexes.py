"""Where a batch's indexes lie: built at first use and kept up to date with the cache."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..plans.plan import Plan
from ..plans.rectify import ALL
from ..selection.index import Index, KeySizes, NewTokens, PageIndex, Views
from ..text.feed import TokenFeed
from ..types import KVView, Rows
from .slots import Arrival, Slots


class Indexes(Protocol):
    """Indexes of one batch of sequences."""

    def begin(self, past: int, clean: int) -> None:
        """Start a call on a cache of `past` slots: whatever was beyond them has been taken back.

        Sparse steps wrote none of its slots below `clean`, or they were rectified.
        """
        ...

    def of(self, layer: int, kv: KVView) -> Index | None:
        """The layer's index, up to date with the cache; None if the policy keeps none there."""
        ...

    def permute(self, rows: Tensor) -> None:
        """Let batch row `i` be what row `rows[i]` was."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def build_seconds(self) -> float: ...


class OwnIndexes:
    """Indexes that belong to one batch alone, whose row i is in slot i.

    Args:
        plan: whose selector makes them.
        text: what is fed, for indexes of text.

    Attributes:
        build_seconds: time that the first update of every layer took.
        update_seconds: time of the later ones; of a device's only what its host needs.
        slots: of an index that takes tokens in.
        fixed: whether that lies in memory which it does not leave, as long as rows stay in order.
    """

    def __init__(self, plan: Plan, text: TokenFeed) -> None:
        self._plan, self._text = plan, text
        self._pages: dict[int, PageIndex] = {}
        self._covered: dict[int, int] = {}
        self._clean, self._rewritten = ALL, 0
        self._new: NewTokens | None = None
        self._followed: Sequence[tuple[int, int]] | None = None
        self._arrivals = list[Arrival]()
        self.slots, self.fixed = Slots(plan, text), False
        self.build_seconds = self.update_seconds = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnIndexes:
        twin = OwnIndexes(self._plan, copy.deepcopy(self._text, memo))
        memo[id(self._plan)] = self._plan
        for name in ("_pages", "slots"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin._covered, twin._clean, twin._rewritten = dict(self._covered), self._clean, self._rewritten
        twin.fixed = self.fixed
        return twin

    def begin(self, past: int, clean: int) -> None:
        self._clean, self._rewritten, self._followed = clean, min(self._rewritten, past), None
        for layer, covered in self._covered.items():
            self._covered[layer] = min(covered, past)

    def fix(self, seen: Callable[[], KVView], longest: int) -> None:
        """Move an index that takes tokens in to memory for rows of at most `longest` tokens, which it does not leave.

        What was taken in is taken in anew. `seen` gives a layer's cache.
        """
        if self.fixed or not self._plan.owns_index or self._plan.moves_index:
            return
        kv = seen()
        index = self._plan.new_slots(KeySizes.of(kv), kv.rows.batch, longest=longest, text=self._text, fixed=True)
        self.slots, self.fixed = Slots(self._plan, self._text, index, kv.rows.batch), True
        self._covered.clear()
        self._rewritten = 0

    def follow(
        self,
        bounds: Sequence[tuple[int, int]],
        layers: tuple[int, ...],
        seen: Callable[[Sequence[int]], Mapping[int, KVView]],
    ) -> None:
        """Take in what a step, behind which rows have these starts and lengths, finds below its last token.

        `seen` gives the caches of `layers` as some rows see them.
        """
        if bounds is not self._followed:
            self._arrivals = []
            for row, (origin, length) in enumerate(bounds):
                self.slots.take_back(row, max(self._rewritten - origin, 0))
                clean = max(self._clean - origin, 0)
                self._arrivals.append(Arrival(row, max(length - 1, 0), length, clean, origin=origin))
            self._followed, self._rewritten = bounds, max(self._rewritten, *map(sum, bounds))
        self.slots.follow(self._arrivals, Views(layers, seen))

    def of(self, layer: int, kv: KVView) -> Index | None:
        layer = self._plan.sources.get(layer, layer)
        if self._plan.selector is None or layer not in self._plan.refreshing:
            return None
        if self._plan.owns_index:
            if kv.rows.bounds is not None and self._covered.get(layer) != kv.rows.max_len:
                self._timed(layer, kv, self._take_in)
            # Else it was followed before the step.
            return self.slots.of(layer, kv)
        if layer not in self._pages:
            index = self._plan.selector.new_index(kv)
            if index is None:
                return None
            self._pages[layer] = index
        length, covered = kv.rows.max_len, self._covered.get(layer, 0)
        if length != covered and (layer not in self._covered or self._completes(kv.rows, length - covered)):
            self._timed(layer, kv, self._update)
        return self._pages[layer]

    def permute(self, rows: Tensor) -> None:
        for index in self._pages.values():
            index.permute(rows)
        if self._plan.owns_index:
            self.slots.permute(rows)
            self.fixed = False

    @property
    def nbytes(self) -> int:
        # A list: another thread may be building while this one asks.
        return self.slots.nbytes + sum(index.nbytes for index in list(self._pages.values()))

    def _timed(self, layer: int, kv: KVView, update: Callable[[int, KVView], None]) -> None:
        start = time.perf_counter()
        update(layer, kv)
        if layer not in self._covered:
            # Once per layer and cache, so waiting for the device costs nothing that anybody would notice.
            if kv.k.is_cuda:
                torch.cuda.synchronize(kv.k.device)
            self.build_seconds += time.perf_counter() - start
        else:
            self.update_seconds += time.perf_counter() - start
        self._covered[layer] = kv.rows.max_len

    def _take_in(self, layer: int, kv: KVView) -> None:
        assert kv.rows.bounds is not None, "the host knows this call's lengths"
        if self.slots.count != kv.rows.batch:
            self.slots = Slots(self._plan, self._text, slots=kv.rows.batch)
        everyone = [*range(kv.rows.batch)]

        def seen(rows: Sequence[int]) -> dict[int, KVView]:
            return {layer: kv if [*rows] == everyone else kv.picked([*rows])}

        self.follow(kv.rows.bounds, (layer,), seen)

    def _update(self, layer: int, kv: KVView) -> None:
        # A layer that shares it begins with a call's first token once another has come to the last one.
        self._pages[layer].update(kv, self._new_tokens(kv.rows, max(kv.rows.max_len - self._covered.get(layer, 0), 1)))

    def _completes(self, rows: Rows, new: int) -> bool:
        """Whether the last `new` tokens fill a unit of some row, so that an index has to know of them."""
        assert self._plan.selector is not None, "it has made the index"
        unit = self._plan.selector.granule
        if unit == 1 or rows.bounds is None:
            return True
        return any(length // unit > (length - new) // unit for _, length in rows.bounds)

    def _new_tokens(self, rows: Rows, count: int) -> NewTokens:
        """One object for all layers of a step."""
        if self._new is None or self._new.rows is not rows or self._new.count != count:
            self._new = NewTokens(rows, count)
        return self._new
