"""Indexes of chunks of text that keep a thing for each slot and layer, and make it anew when its chunks change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from saccade.selection.index import LayerIndex, SlotSizes, Views
from saccade.text.feed import TokenFeed
from saccade.text.table import ChunkTable, Cuts
from saccade.types import Intake, KVView

Held = TypeVar("Held")


class ChunkedIndex:
    """A `saccade.selection.index.SlotIndex` whose layers are of class `layer`, which `settings` are handed to."""

    def __init__(self, settings: Any, cuts: Cuts, layer: type[ChunkedLayer[Any]], sizes: SlotSizes) -> None:
        self.keys, self.text = sizes.keys, sizes.text
        self.table = ChunkTable(cuts, sizes.text, sizes.slots, 1, sizes.keys.device)
        self.layers = {number: layer(self, settings, [None] * sizes.slots) for number in sizes.layers}
        self._placed: Sequence[int] | None = None

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        self.table.take_in(new)
        for one in (one for one in new if one.kept < one.stop):
            chunks = int(self.table.counts[one.slot])
            kvs, edges = views.of((one.slot,)), self.table.edges[one.slot, : chunks + 1]
            for layer, kv in ((self.layers[number], kvs[number]) for number in views.layers):
                layer.held[one.slot] = layer.planted(one.slot, kv, edges, self.text) if chunks else None

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        self._placed = slots

    def slots_of(self, batch: int) -> Sequence[int]:
        """Where the rows of a step are."""
        return range(batch) if self._placed is None else self._placed

    def grow(self, slots: int, longest: int) -> None:
        have, chunks = len(self.table.stops), self.table.cuts.most(longest)
        if slots > have or chunks >= self.table.edges.shape[1]:
            rows = torch.arange(max(slots, have), device=self.table.edges.device).clamp(max=have)
            self.table.arrange(rows, chunks + chunks // 8)
        for layer in self.layers.values():
            layer.held += [None] * (slots - have)

    def clear(self, slot: int) -> None:
        self.table.clear(slot)
        for layer in self.layers.values():
            layer.held[slot] = None

    def permute(self, rows: Tensor) -> None:
        self.table.arrange(rows, 0)
        for layer in self.layers.values():
            layer.held[:] = [layer.held[row] for row in rows.tolist()]

    @property
    def nbytes(self) -> int:
        held = (one for layer in self.layers.values() for one in layer.held if one is not None)
        table = self.table
        total: int = sum(one.nbytes for one in (*held, table.edges, table.counts, table.ends))
        return total


class ChunkedLayer(LayerIndex, ABC, Generic[Held]):
    """One layer: what is `held` for each slot, None where there are no chunks."""

    def __init__(self, owner: ChunkedIndex, settings: Any, held: list[Held | None]) -> None:
        self.owner, self.settings, self.held = owner, settings, held

    @abstractmethod
    def planted(self, slot: int, kv: KVView, edges: Tensor, text: TokenFeed | None) -> Held:
        """From the chunks between `edges` `[C + 1]` of the only row; those of what is held are the first of them."""

    @abstractmethod
    def narrowed(self, held: Held, start: int, stop: int) -> Held:
        """Of KV heads `start..stop`."""

    def heads(self, start: int, stop: int) -> ChunkedLayer[Held]:
        some = [None if one is None else self.narrowed(one, start, stop) for one in self.held]
        return type(self)(self.owner, self.settings, some)
