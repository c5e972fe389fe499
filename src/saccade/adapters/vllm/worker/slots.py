"""The requests of a worker in the slots of an index: who is in which, and what is new of each, ahead of every step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....decode.slots import Looked, Slots
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

    slots: RequestSlots
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


class RequestSlots(Slots):
    """The index of all requests of a worker, which stay in their slots.

    Args:
        plan: whose selector makes it.
        phase: when a step is dense.
        text: what the requests are fed.
        view: a layer's cache as some rows see it.
        index: in memory that was set aside for so many `requests`, which captured steps of at most so many `rows`
            search; None: it is made when it is needed, grows, and gives all room back when the last has left.
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
        super().__init__(plan, text, requests, index)
        self._phase, self._requests, self._view = phase, text, view
        self._free, self._warm, self._most = [*range(requests)], index is None, rows
        self._placed, self._places = list[int](), torch.empty(0, device="cpu")

    def enter(self) -> int:
        """The lowest slot that nobody has, empty; one more if all are taken."""
        if not self._free:
            assert not self.fixed, "there are as many slots as sequences"
            self._looked.append(Looked())
            return self.count - 1
        slot: int = heapq.heappop(self._free)
        self.clear(slot)
        return slot

    def leave(self, slot: int) -> None:
        """Give a slot back; who comes back is indexed anew, which gives the same index."""
        heapq.heappush(self._free, slot)
        if len(self._free) == self.count and not self.fixed:
            self.restart(0)
            self._free = []

    def follow(self, batch: Batch, table: Tensor, lengths: Tensor, *, drafts: bool = False) -> None:
        """Bring the index up to what is in the cache before a step; blocks int32 `[B, n]`, lengths int32 `[B]`.

        `drafts`: whether all that it writes is a draft.
        """
        due, rows = list[Intake](), dict[int, int]()
        for row, (request, decodes) in enumerate(zip(batch.requests, batch.decoding, strict=True)):
            if not request.sparse or not batch.queries[row]:
                continue
            length, clean = self._noted(batch, row, drafts)
            memory: SlotMemory = request.memory
            if not decodes and self._plan.covers(length):
                continue
            if memory.slot is None:
                memory.slot = self.enter()
                if not decodes:
                    # It may have found blocks that another request computes in this very step.
                    continue
            self._requests.here[memory.slot] = request, batch.places[row]
            due.append(self.due(memory.slot, length, clean))
            rows[memory.slot] = row
        self.bring(due, self._views(lambda some: batch.picked([rows[slot] for slot in some], table, lengths)))

    def warm_up(self, batch: Batch, table: Tensor, lengths: Tensor) -> None:
        """Compile what taking tokens in needs, before a request does: of nobody's slot, which stays empty."""
        if not self._warm and self.index is not None:
            views = self._views(lambda slots: batch.picked([0] * len(slots), table, lengths))
            self.index.take_in([Intake(self.count, 0, 0, 0)], views)
        self._warm = True

    def place(self, requests: Sequence[RequestRow | None], rows: Rows) -> None:
        """Let a step search the index of its first rows' requests; None, and rows behind them: nobody's.

        In memory that was set aside, they are always told in the same memory, which a graph reads.
        """
        slots = (None if one is None or one.memory is None else one.memory.slot for one in requests)
        told = [self.count if slot is None else slot for slot in slots]
        told += [self.count] * (rows.batch - len(told))
        most, device = self._most if self.fixed else rows.batch, rows.seq_lens.device
        if len(self._places) != most:
            self._placed, self._places = [], torch.full((most,), self.count, dtype=torch.int32, device=device)
        if self._placed[: rows.batch] != told:
            self._placed[: rows.batch] = told
            new = torch.tensor(told, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            self._places[: rows.batch].copy_(new.to(device, non_blocking=True))
        if self.index is not None:
            self.index.place(told, self._places[: rows.batch])

    def _noted(self, batch: Batch, row: int, drafts: bool) -> tuple[int, int]:
        """Tell a request's memory of a step: how many tokens it has behind it, and how many clean ones before it."""
        request, length, count = batch.requests[row], batch.lengths[row], batch.queries[row]
        start = length - count
        if request.memory is None:
            # What it found in the prefix cache is clean.
            request.memory = SlotMemory(self, Clean(self._phase).at(start))
        request.memory.wrote(start, count, dense=count > 1 or batch.prefilling[row])
        return length, min(start, request.memory.final.boundary)

    def _views(self, seen: Callable[[Sequence[int]], Rows]) -> Views:
        def of(slots: Sequence[int]) -> Mapping[int, KVView]:
            rows = seen(slots)
            return {layer: self._view(layer, rows) for layer in self._layers}

        return Views(self._layers, of)
