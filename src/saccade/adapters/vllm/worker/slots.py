"""The requests of a worker in the slots of an index: what is new of each, ahead of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ....decode.slots import Arrival, Slots
from ....plans.plan import Plan
from ....plans.rectify import Clean, Phase
from ....selection.index import SlotIndex, Views
from ....types import Intake, KVView, Rows
from .batch import Batch
from .fed import RequestFeed
from .requests import RequestRow


@dataclass(slots=True, eq=False)
class SlotMemory:
    """What is kept for a request between its steps.

    Attributes:
        slots: which it enters and leaves.
        final: how far its cache is clean.
        slot: where its index is; None before it is indexed, and while it is not in the batch.
    """

    slots: Slots
    final: Clean
    slot: int | None = None

    def wrote(self, start: int, count: int, *, dense: bool) -> None:
        """Note a step that writes `count` positions from `start` on; a dense one never begins behind inexact ones."""
        if self.slot is not None:
            self.slots.take_back(self.slot, start)
        self.final = self.final.after(start, count, dense=dense, covered=dense)

    def leave(self) -> None:
        """Give the slot back."""
        if self.slot is not None:
            self.slots.leave(self.slot)
        self.slot = None


class RequestSlots:
    """The index of all requests of a worker.

    Args:
        plan: whose selector makes it.
        phase: when a step is dense.
        text: what the requests are fed.
        view: a layer's cache as some rows see it.
        index: in memory that was set aside for so many `requests`, which captured steps of at most so many `rows`
            search; None: it is made when it is needed, and grows.
    """

    def __init__(
        self,
        plan: Plan,
        phase: Phase,
        text: RequestFeed,
        view: Callable[[int, Rows], KVView],
        index: SlotIndex | None = None,
        requests: int = 0,
        rows: int = 0,
    ) -> None:
        self._plan, self._phase, self._view, self._text = plan, phase, view, text
        self._layers, self._warm = tuple(sorted(plan.refreshing)), index is None
        self.slots = Slots(plan, text, index, requests, rows)

    def follow(self, batch: Batch, table: Tensor, lengths: Tensor) -> None:
        """Bring the index up to what is in the cache before a step; blocks int32 `[B, n]`, lengths int32 `[B]`."""
        arrivals, rows = list[Arrival](), dict[int, int]()
        for row, (request, decodes) in enumerate(zip(batch.requests, batch.decoding, strict=True)):
            length, count = batch.lengths[row], batch.queries[row]
            start = length - count
            if not request.sparse or not count:
                continue
            if request.memory is None:
                # What it found in the prefix cache is clean.
                request.memory = SlotMemory(self.slots, Clean(self._phase).at(start))
            memory: SlotMemory = request.memory
            memory.wrote(start, count, dense=count > 1 or batch.prefilling[row])
            if not decodes and self._plan.covers(length):
                continue
            if memory.slot is None:
                memory.slot = self.slots.enter()
                if not decodes:
                    # It may have found blocks that another request computes in this very step.
                    continue
            self._text.here[memory.slot] = request, batch.places[row]
            arrivals.append(Arrival(memory.slot, start, length, memory.final.boundary))
            rows[memory.slot] = row
        views = Views(
            self._layers, lambda some: self._seen(batch.picked([rows[slot] for slot in some], table, lengths))
        )
        self.slots.follow(arrivals, views)

    def warm_up(self, batch: Batch, table: Tensor, lengths: Tensor) -> None:
        """Compile what taking tokens in needs, before a request does: of nobody's slot, which stays empty."""
        if not self._warm and self.slots.index is not None:
            views = Views(self._layers, lambda _: self._seen(batch.picked([0], table, lengths)))
            self.slots.index.take_in([Intake(self.slots.count, 0, 0, 0)], views)
        self._warm = True

    def place(self, requests: Sequence[RequestRow | None], rows: Rows) -> None:
        """Let a step search the index of its first rows' requests; None: it does not search."""
        found = [None if one is None or one.memory is None else one.memory.slot for one in requests]
        self.slots.place(found, rows.batch, rows.seq_lens.device)

    def _seen(self, rows: Rows) -> Mapping[int, KVView]:
        return {layer: self._view(layer, rows) for layer in self._layers}
