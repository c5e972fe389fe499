"""What a call finds in its cache, which is put back if the call raises."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from . import cache
from .window import RewindingWindow

_RENEWED = (DynamicLayer, DynamicSlidingWindowLayer, RewindingWindow)
"""Layers that write nothing into what they hold: they hold other tensors then."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The state of a cache ahead of a call.

    Attributes:
        held: the cache.
        slots: that are filled.
        count: layers it has; the others are made at their first use.
        empty: layers that have never held anything, whose next tokens may be of another batch.
        others: layers that no policy concerns, with what they hold.
        rewritten: slots from this one on are written anew, in layers of ours, which held this.
    """

    held: Any
    slots: int
    count: int
    empty: tuple[Any, ...]
    others: tuple[tuple[Any, dict[str, Any]], ...]
    rewritten: list[tuple[Any, int, list[Tensor]]] = field(default_factory=list)

    @classmethod
    def now(cls, held: Any, slots: int, keeping: Collection[int]) -> Found:
        """Of a cache whose layers `keeping` are ours."""
        layers = held.layers
        empty = () if slots else tuple(layer for layer in layers if not getattr(layer, "is_initialized", True))
        mixed = len(layers) > len(keeping)
        others = tuple((one, dict(vars(one))) for one in layers if type(one) in _RENEWED) if mixed else ()
        return cls(held, slots, len(layers), empty, others)

    def keep(self, start: int) -> None:
        """Keep what the slots from `start` on hold."""
        for layer in cache.keeping_of(self.held):
            if isinstance(layer, (cache.GrowingLayer, cache.IndexedStaticLayer)):
                held = [part[:, :, start : self.slots].clone() for part in _parts(layer)]
                self.rewritten.append((layer, start, held))

    def put_back(self) -> list[str]:
        """Let the cache be as it was found; types of layers that cannot be, as they write into what they hold."""
        del self.held.layers[self.count :]
        for layer, state in self.others:
            vars(layer).clear()
            vars(layer).update(state)
        for layer, start, held in self.rewritten:
            for part, kept in zip(_parts(layer), held, strict=True):
                part[:, :, start : self.slots].copy_(kept)
        spoilt = set()
        for layer in cache.keeping_of(self.held):
            if any(layer is one for one in self.empty):
                layer.reset()
                layer.is_initialized, layer.keys, layer.values = False, None, None
            elif isinstance(layer, StaticLayer) and not hasattr(layer, "cumulative_length"):
                _parts(layer)[0][:, :, self.slots :] = 0  # transformers 4 counts keys that are not 0
            elif hasattr(layer, "end_at"):
                layer.end_at(self.slots)
            elif type(layer) not in _RENEWED:
                spoilt.add(type(layer).__name__)
        return sorted(spoilt)


def _parts(layer: Any) -> tuple[Tensor, Tensor]:
    """Where a layer of ours keeps keys and values, `[B, Hkv, capacity, d]`."""
    parts: tuple[Tensor, Tensor] = getattr(layer, "buffers", None) or (layer.keys, layer.values)
    return parts
