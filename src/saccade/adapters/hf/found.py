"""What a call finds in its cache, which is put back if the call raises."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from . import cache
from .window import RewindingWindow

_RENEWED = (DynamicLayer, DynamicSlidingWindowLayer, RewindingWindow)  # they write nothing into what they hold


class Found:
    """The state of a cache `held` ahead of a call: `slots` are filled, and its layers `keeping` are ours."""

    def __init__(self, held: Any, slots: int, keeping: Sequence[int]) -> None:
        layers = held.layers
        self._held, self._slots, self._count = held, slots, len(layers)
        # The next tokens of those that have never held anything may be of another batch.
        self._empty = () if slots else [layer for layer in layers if not getattr(layer, "is_initialized", True)]
        renewed = (layer for layer in layers if type(layer) in _RENEWED) if len(layers) > len(keeping) else ()
        self._others = [(layer, dict(vars(layer))) for layer in renewed]
        self._rewritten: list[tuple[Any, slice, list[Tensor]]] = []

    def keep(self, start: int) -> None:
        """Keep what the slots from `start` on hold, which are to be written anew."""
        ours, places = (cache.GrowingLayer, cache.IndexedStaticLayer), slice(start, self._slots)
        layers = (layer for layer in cache.keeping_of(self._held) if isinstance(layer, ours))
        self._rewritten = [(layer, places, [part[:, :, places].clone() for part in _parts(layer)]) for layer in layers]

    def put_back(self, forget: Callable[[int], None]) -> list[str]:
        """Let the cache be as it was found, and `forget` what was fed behind its slots.

        Returns types of layers that cannot be, as they write into what they hold.
        """
        forget(self._slots)
        del self._held.layers[self._count :]
        for layer, state in self._others:
            layer.__dict__ = state
        for layer, places, kept in self._rewritten:
            if _parts(layer)[0].shape[2] < places.stop:  # there was no memory for larger buffers
                layer._hold(*(torch.cat(pair, 2) for pair in zip(_parts(layer), kept, strict=True)), places.stop)
            for part, before in zip(_parts(layer), kept, strict=True):
                part[:, :, places].copy_(before)
        spoilt = set()
        for layer in cache.keeping_of(self._held):
            if any(layer is one for one in self._empty):
                layer.reset()
                layer.is_initialized, layer.keys, layer.values = False, None, None
            elif isinstance(layer, cache.IndexedStaticLayer) and not hasattr(layer, "cumulative_length"):
                _parts(layer)[0][:, :, self._slots :] = 0  # transformers 4 counts keys that are not 0
            elif hasattr(layer, "end_at"):
                layer.end_at(self._slots)
            elif type(layer) not in _RENEWED:
                spoilt.add(type(layer).__name__)
        return sorted(spoilt)


def _parts(layer: Any) -> tuple[Tensor, Tensor]:
    """Where a layer of ours keeps keys and values, `[B, Hkv, capacity, d]`."""
    return layer.buffers or (layer.keys, layer.values)
