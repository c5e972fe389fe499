"""Cache layers for transformers: a preallocated, growing buffer, and index upkeep beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ...errors import UnsupportedModelError
from ...plans.plan import Plan
from ...types import Rows
from .huge_pages import long_lived
from .session import Session, lasting
from .window import RewindingWindow

MINIMUM_GROWTH = 256
FED = "_saccade_fed"  # what `tell` has said of a cache
_KEEPS_NOTHING: Any = getattr(cache_utils, "DummyLayer", ())


class RoomyLayer(DynamicLayer):
    """A filled `DynamicLayer` whose `length` tokens lie at the start of larger buffers `[B, Hkv, capacity, d]`."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.buffers = keys, values
        self.keys, self.values = self.shown = keys[:, :, :length], values[:, :, :length]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` that appends in place; `keys` and `values` are views `[B, Hkv, T, d]` of larger buffers.

    `shown` are those that were set here; others than these somebody has set by hand.
    """

    def __init__(self, session: Session, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.session, self.layer = session, layer
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.shown: tuple[Tensor | None, Tensor | None] = None, None

    @classmethod
    def adopt(cls, stock: DynamicLayer, session: Session, layer: int) -> GrowingLayer:
        """Take over what a stock layer or an earlier run's layer holds, without a copy; its first append makes room."""
        adopted = cls(session, layer)
        if stock.keys is not None and stock.values is not None and stock.get_seq_length() > 0:
            adopted._hold(stock.keys, stock.values, stock.get_seq_length())
            if not is_set_by_hand(stock):
                adopted.buffers = getattr(stock, "buffers", None)
        return adopted

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        see(self)
        past = self.get_seq_length()
        length = past + key_states.shape[-2]
        self.session.stored.add(self.layer)
        keys, values = self._room(key_states, value_states, past, length)
        keys[:, :, past:length].copy_(key_states)
        values[:, :, past:length].copy_(value_states)
        return self._hold(keys, values, length)

    def crop(self, tokens_to_remove: int) -> None:
        if self.get_seq_length() == 0:
            return
        see(self)
        super().crop(tokens_to_remove)
        self.shown = self.keys, self.values
        # Whoever takes tokens back may feed others in their place, unseen if that is stock.
        self.session.drafts = None
        self.session.state.history.forget(self.get_seq_length())

    def end_at(self, slots: int) -> None:
        """Show the first `slots` slots: hide what lies behind, or show again what was hidden; nothing is copied."""
        see(self)
        if slots != self.get_seq_length():
            assert self.keys is not None and self.values is not None, "only what was appended here is moved"
            self.buffers = self.buffers or (self.keys, self.values)
            self._hold(*self.buffers, slots)

    def reset(self) -> None:
        self.keys = self.values = self.buffers = None
        self.shown = None, None
        self.is_initialized = False
        self.session.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None and self.get_seq_length() > 0:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        see(self)
        length = self.get_seq_length()
        if self.keys is not None and self.values is not None and length > 0:
            keys, values = self.buffers or (self.keys, self.values)
            indices = indices.to(keys.device)
            if indices.dtype == torch.bool:
                indices = indices.nonzero()[:, 0]
            with lasting():
                self.buffers = keys.index_select(0, indices), values.index_select(0, indices)
                self.session.permute(self.layer, indices)
            self._hold(*self.buffers, length)

    def _hold(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        held = keys[:, :, :length], values[:, :, :length]
        self.keys, self.values = self.shown = held
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        return held

    def _room(self, key_states: Tensor, value_states: Tensor, past: int, length: int) -> tuple[Tensor, Tensor]:
        """Buffers that hold `length` tokens, what is cached included."""
        if self.buffers is not None and self.buffers[0].shape[-2] >= length:
            return self.buffers
        capacity = length + max(MINIMUM_GROWTH, length // 8)
        # One after the other, so that only one old buffer lives beside its successor.
        self.buffers = None
        keys = _grown(self.keys if past else None, key_states, past, capacity)
        self.keys = keys[:, :, :past]
        self.shown = self.keys, self.values
        values = _grown(self.values if past else None, value_states, past, capacity)
        self.buffers = keys, values
        return self.buffers


class IndexedStaticLayer(StaticLayer):
    """A `StaticLayer` that tells the session when its rows move or its content goes."""

    session: Session
    layer: int
    buffers: None = None
    shown: tuple[Tensor | None, Tensor | None] = None, None

    @classmethod
    def adopt(cls, stock: StaticLayer, session: Session, layer: int) -> IndexedStaticLayer:
        """The same buffers, lengths and addresses under this class."""
        adopted = cls.__new__(cls)
        adopted.__dict__.update(stock.__dict__)
        adopted.session, adopted.layer = session, layer
        adopted.shown = adopted.keys, adopted.values
        return adopted

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)
        self.shown = self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        slots = self.session.call.slots
        self.session.stored.add(self.layer)
        if slots is None:
            held: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return held
        assert self.keys is not None and self.values is not None, "only filled caches have such slots"
        # `advance` has found the slots for all layers at once, and counted the token.
        return self.keys.index_copy_(2, slots, key_states), self.values.index_copy_(2, slots, value_states)

    def end_at(self, slots: int) -> None:
        """Show the first `slots` slots: hide what lies behind, or show again what was hidden; addresses stay."""
        if not hasattr(self, "cumulative_length"):
            raise UnsupportedModelError("rectification on a StaticCache needs transformers 5; pass a DynamicCache")
        # A tensor, changed in place: a compiled step may hold its address.
        self.cumulative_length += slots - int(self.cumulative_length)

    def reset(self) -> None:
        super().reset()
        self.session.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.shown = self.keys, self.values
        if self.keys is not None:
            with lasting():
                self.session.permute(self.layer, beam_idx.to(self.keys.device))


# Of layers that a policy concerns no window is narrower than the model's positions, so these hold everything too.
_WINDOWED = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)
_ADOPTED = (DynamicLayer, RoomyLayer, GrowingLayer, StaticLayer, IndexedStaticLayer, *_WINDOWED)


def session_of(cache: Any) -> Session | None:
    """The session whose layers a cache holds, if any."""
    first = _first(cache)
    return None if first is None else first.session


def filled(cache: Any, positions: Tensor | None = None) -> int:
    """Slots that hold a token; of a cache of ours by its first layer of ours, as others may not know.

    `positions`: the slots of the tokens to come, as transformers 4 tells them; its static caches count keys that are
    not 0, and the embedding of a padding token is 0.
    """
    first = _first(cache)
    told = isinstance(getattr(first, "cumulative_length", None), Tensor)
    if positions is not None and isinstance(first, StaticLayer) and not told:
        return int(positions[0])
    return int((cache if first is None else first).get_seq_length())


def is_set_by_hand(layer: Any) -> bool:
    """Whether a layer holds other keys or values than those that were set here."""
    keys, values = getattr(layer, "shown", (layer.keys, layer.values))
    return layer.keys is not keys or layer.values is not values


def see(layer: GrowingLayer | IndexedStaticLayer) -> None:
    """Take over what somebody has set by hand; nothing that was known of the sequences holds for it."""
    if is_set_by_hand(layer):
        keys, values = (None if held is None else list(held.shape[:3]) for held in (layer.keys, layer.values))
        if keys != values:
            raise UnsupportedModelError(f"layer {layer.layer} of the cache has keys {keys}, values {values}")
        layer.shown, layer.buffers = (layer.keys, layer.values), None
        layer.session.reset()


def look_over(cache: Any, session: Session, batch: int | None = None) -> None:
    """Take over what was set by hand since a session's last call; an UnsupportedModelError if it does not fit."""
    if session.spoilt is not None:
        raise UnsupportedModelError(f"a call that raised has left {session.spoilt} changed: begin anew in a new cache")
    layers = [cache.layers[layer] for layer in session.keeping]
    for layer in layers:
        see(layer)
        if batch is not None and layer.keys is not None and layer.keys.shape[0] != batch:
            raise UnsupportedModelError(f"this call has {batch} rows, and the cache {layer.keys.shape[0]}")
    if not session.fixed:
        refuse_uneven(layers)


def refuse_uneven(layers: Iterable[Any]) -> None:
    """Raise an UnsupportedModelError unless layers of a growing cache hold the same number of tokens."""
    lengths = {layer.get_seq_length() for layer in layers}
    if len(lengths) > 1:
        told = f"{min(lengths)} tokens in a layer and {max(lengths)} in another"
        raise UnsupportedModelError(f"the cache holds {told}; saccade decodes from layers of the same length")


def _first(cache: Any) -> GrowingLayer | IndexedStaticLayer | None:
    ours = (GrowingLayer, IndexedStaticLayer)
    return next((layer for layer in getattr(cache, "layers", ()) if isinstance(layer, ours)), None)


def tell(cache: Any, ids: Tensor) -> None:
    """Say which tokens `[B, n]` a cache was filled with before a policy was attached; indexes of text read them."""
    setattr(cache, FED, ids)


def keeping_of(cache: Any) -> list[Any]:
    """The layers of a cache that keep something; transformers 5.24 lists others with them."""
    return [layer for layer in cache.layers if not isinstance(layer, _KEEPS_NOTHING)]


def end_at(cache: Any, slots: int) -> None:
    """Let every layer of a cache of ours show its first `slots` slots, whatever an interrupted call has left."""
    for layer in keeping_of(cache):
        layer.end_at(slots)


def room(cache: Any) -> int | None:
    """Slots that a static cache has left; None if the cache grows."""
    first = cache.layers[0]
    return first.max_cache_len - int(first.get_seq_length()) if isinstance(first, StaticLayer) else None


def advance(cache: Any, starts: Tensor, again: int = 0) -> tuple[Rows, Tensor]:
    """Make a static cache one token longer; its layers write that next, and the `again` tokens before it anew.

    Nothing is read from the device. The cache is filled and of transformers 5: its layers keep their length on the
    device. `starts` are int32 `[B]`, the first real slot of each row. Gives the rows with all of these tokens, and the
    tokens' slots, int64 `[again + 1]`.
    """
    first = cache.layers[0]
    with lasting():
        last = first.cumulative_length.reshape(1).clone()
        slots = last + torch.arange(-again, 1, device=last.device) if again else last
        table = torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)[:, None]
        rows = Rows(table, starts, (last + 1 - starts).int(), first.max_cache_len)
    # In one launch where the device allows it: each layer has a length of its own.
    torch._foreach_add_([layer.cumulative_length for layer in keeping_of(cache)], 1)
    return rows, slots


def refuse_moving(cache: Any) -> None:
    """Raise an UnsupportedModelError unless a cache stays where it is in memory and keeps its length on the device.

    That is a filled `StaticCache` of transformers 5.
    """
    refuse_cache(cache)
    first = cache.layers[0] if cache.layers else None
    if not isinstance(first, StaticLayer) or not first.is_initialized:
        raise UnsupportedModelError("a graph needs a cache that stays in its place: pass a StaticCache with its prompt")
    if not hasattr(first, "cumulative_length"):
        raise UnsupportedModelError("a graph needs a cache that keeps its length on the device, as transformers 5 does")


def install(cache: Any, session: Session, plan: Plan, reach: int | None = None) -> None:
    """Replace the layers of a cache that a plan concerns by ours, taking over what they hold.

    `reach`: of all layers, the others included, that many of the last tokens can be taken back; None: nobody asks.
    Raises an UnsupportedModelError for caches that keep KV in another form or place, or forget on their own.
    """
    own = [layer for layer in range(len(plan.roles.layers)) if layer not in plan.sources]
    keeping = [layer for layer in own if plan.roles.layers[layer]]
    refuse_cache(cache, keeping)
    # A lazily growing cache may hold fewer layers yet, and knows no others than these.
    last = keeping[-1] if reach is None else own[-1]
    layers = [*cache.layers, *(DynamicLayer() for _ in range(len(cache.layers), last + 1))]
    refuse_uneven(layers[layer] for layer in keeping if not isinstance(layers[layer], StaticLayer))
    session.keeping, session.fixed = tuple(keeping), isinstance(layers[keeping[0]], StaticLayer)
    for layer in keeping:
        ours = IndexedStaticLayer if isinstance(layers[layer], StaticLayer) else GrowingLayer
        layers[layer] = ours.adopt(layers[layer], session, layer)
    if reach is not None:
        for layer in {*own}.difference(keeping):
            if not isinstance(layers[layer], DynamicSlidingWindowLayer):
                told = f"rectification takes tokens back, of which a {type(layers[layer]).__name__} does not know"
                raise UnsupportedModelError(f"{told}; pass DynamicCache(config=model.config)")
            layers[layer] = RewindingWindow.adopt(layers[layer], reach)
    cache.layers = layers


def refuse_cache(cache: Any, concerned: Iterable[int] | None = None) -> None:
    """Raise unless a cache is a plain dynamic or static one, in its layers that a policy concerns; None: in all."""
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        kind = type(cache).__name__
        raise UnsupportedModelError(
            f"saccade cannot decode from a cache of type {kind}; pass a DynamicCache or StaticCache"
        )
    if getattr(cache, "offloading", False):
        raise UnsupportedModelError("saccade does not support offloaded caches: selection reads the cache every step")
    layers = cache.layers
    for stock in keeping_of(cache) if concerned is None else (layers[one] for one in concerned if one < len(layers)):
        if type(stock) not in _ADOPTED:
            raise UnsupportedModelError(
                f"saccade does not support cache layers of type {type(stock).__name__} "
                "(quantized, chunked, linear-attention); use a DynamicCache or StaticCache"
            )


def _grown(old: Tensor | None, new: Tensor, past: int, capacity: int) -> Tensor:
    with lasting():
        buffer = long_lived((*new.shape[:2], capacity, new.shape[-1]), new)
    if old is not None:
        buffer[:, :, :past].copy_(old)
    return buffer
