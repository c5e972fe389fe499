"""What the host does ahead of a step whose lengths only the device knows: indexes take tokens in, passes become due."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...decode.rows import RowSlots
from ...errors import UnsupportedModelError
from ...types import KVView, Rows
from .cache import refuse_moving
from .rectify import Rectifier
from .session import Session, lasting


class Upkeep:
    """Prepares each step of a cache whose lengths only the device knows, by lengths that the host knows.

    Args:
        session: of the cache.
        cache: a filled `StaticCache` of ours.
        starts: int32 `[B]`, each row's first real slot; read on the host.
        rectifier: of a policy whose sparse steps are made good.
    """

    def __init__(self, session: Session, cache: Any, starts: Tensor, rectifier: Rectifier | None = None) -> None:
        refuse_moving(cache)
        self._session, self._cache, self._rectifier, indexes = session, cache, rectifier, session.state.indexes
        self._indexes, self._slots = indexes, indexes if isinstance(indexes, RowSlots) else None
        self._first, device = starts.tolist(), cache.layers[0].keys.device
        with lasting():
            self._starts = starts.to(device)
            self._table = torch.arange(len(self._first), dtype=torch.int32, device=device)[:, None]
            self._everyone, longest = [*range(len(self._first))], cache.layers[0].max_cache_len
            self._layers = tuple(sorted(session.state.plan.refreshing))
            if self._slots is not None:
                self._slots.fix(lambda: self._seen(self._everyone, longest)[self._layers[0]], longest)
        self._index = None if self._slots is None else self._slots.index
        self._before = session.final, 0

    @property
    def lost(self) -> bool:
        """Whether the indexes have left the memory that a graph knows."""
        moved = self._slots is not None and self._slots.index is not self._index
        return moved or self._session.state.indexes is not self._indexes

    def before(self, past: int, tokens: Tensor) -> Tensor:
        """Prepare a step behind `past` slots that decodes `tokens`, int64 `[B, 1]`; gives what it is to be fed.

        That is `tokens`, or where a dense pass is due, `[B, every + 1]`: those that it runs again, and `tokens`.
        Raises an UnsupportedModelError if more tokens wait than `every`, as another policy may have left them.
        """
        state, passed = self._session.state, self._rectifier
        session, history = self._session, state.history
        self._before = session.final, 0
        with lasting():
            if passed is not None or history.levels is not None:
                session.record(past, 1, len(self._first), tokens, (past - self._starts)[:, None])
            unclean = session.unclean(past)
            due = passed is not None and passed.phase.due(unclean)
            if due and not state.needs_selection(past + 1):
                # Nothing to run again: their sets held all tokens, as this one's will.
                due, session.final = False, session.final.after(past, 1, dense=False)
            if passed is None or not due:
                self.prepare(past, 1)
                return tokens
            if unclean != passed.phase.every:
                raise UnsupportedModelError(
                    f"{unclean} tokens of this cache were decoded sparsely and a pass runs {passed.phase.every} again: "
                    "decode the next token in an ordinary call"
                )
            # An index of text has seen none of what is rewritten: it takes in clean text alone.
            self._before = session.final, unclean
            session.final = session.final.after(past - unclean, unclean + 1, dense=True)
            self.prepare(past, unclean + 1)
            passed.done.add(passes=1, rewritten=unclean)
            return history.fed(past - unclean, past + 1)

    def prepare(self, past: int, count: int) -> None:
        """Let the next step bring `count` tokens of each row; ahead of a single one indexes take in what is clean."""
        self._session.promised = count
        if count == 1 and self._slots is not None and self._slots.fixed:
            with lasting():
                self._slots.begin(past, self._session.final.boundary)
                bounds = [(start, past + 1 - start) for start in self._first]
                self._slots.follow(bounds, self._layers, lambda rows: self._seen(rows, past + 1))

    def done(self) -> None:
        """Note that the step was a replay, which nobody else hears of."""
        self._session.promised = 0

    def undo(self) -> None:
        """Note that the step that `before` has prepared was not launched, or nobody knows: what was clean still is."""
        self._session.final, rewritten = self._before
        self._before = self._session.final, 0
        if rewritten and self._rectifier is not None:
            self._rectifier.done.add(passes=-1, rewritten=-rewritten)
        self.done()

    def again(self, past: int) -> int:
        """Tokens of a row in the dense passes to come; 0 if none will before the cache, `past` slots of it, is full."""
        every = None if self._rectifier is None else self._rectifier.phase.every
        capacity = self._cache.layers[0].max_cache_len
        if every is None or not self._session.state.needs_selection(capacity):
            return 0
        return every + 1 if past - self._session.unclean(past) + every < capacity else 0

    def catch_up(self, past: int) -> None:
        """Let bounds of keys take in what calls by others have left below slot `past`; the host may wait."""
        if self._layers and (self._slots is None or not self._slots.fixed):
            with lasting():
                self._indexes.begin(past, self._session.final.boundary)
                for layer, view in self._seen(self._everyone, past).items():
                    self._indexes.of(layer, view)

    def _seen(self, rows: Sequence[int], length: int) -> Mapping[int, KVView]:
        """The caches of the layers that refresh, filled to `length` slots, as some rows see them."""
        bounds = tuple((start, length - start) for start in self._first)
        where = Rows(self._table, self._starts, (length - self._starts).int(), length, bounds)
        held = (self._cache.layers[layer] for layer in self._layers)
        views = [KVView(one.keys.transpose(1, 2), one.values.transpose(1, 2), where) for one in held]
        picked = views[0].picked([*rows]).rows
        return {layer: KVView(view.k, view.v, picked) for layer, view in zip(self._layers, views, strict=True)}
