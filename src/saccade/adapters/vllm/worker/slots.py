"""Indexes of text: one tree a layer for all requests, which enter and leave its slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from ....plans.plan import Plan
from ....plans.rectify import Phase
from ....selection.chunk_table import Feed
from ....selection.history import ALL_CLEAN, TokenHistory
from ....selection.selector import Reserved, SlotIndex
from ....types import KVView, Rows
from .fed import Fed
from .requests import RequestRow

SLICE = 2048
"""Tokens of prompts that a step takes in, or as many as it computes; of rows that decode it takes in all there is."""

LITTLE = 512
"""Tokens that a request brings at most while it decodes: a full buffer, or what a dense pass has made final."""


@dataclass(slots=True, eq=False)
class SlotMemory:
    """What is kept for a request between its steps.

    Attributes:
        phase: when a step is dense.
        free: slots that nobody has.
        clean: positions below it hold keys and values that no sparse step wrote, or that were rectified since.
        rewritten: first position written since the index was last brought up to date.
        slot: where its index is; None before it is indexed, and while it is not in the batch.
    """

    phase: Phase
    free: list[int]
    clean: int = ALL_CLEAN
    rewritten: int = 0
    slot: int | None = None

    def written(self, start: int, stop: int, *, dense: bool) -> None:
        """Note a step that writes positions `start..stop`."""
        self.rewritten = min(self.rewritten, start)
        # The phase counts from the prompt whether or not a budget covers the row, as in the transformers adapter.
        if self.phase.every is not None and (
            dense or self.clean == ALL_CLEAN or self.phase.due(start - self.clean, stop - start)
        ):
            self.clean = stop

    def leave(self) -> None:
        """Give the slot back; who comes back is indexed anew, which gives the same index."""
        if self.slot is not None:
            heapq.heappush(self.free, self.slot)
        self.slot, self.rewritten = None, 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request in the step at hand: place in vLLM's batch, tokens before the step and with it, whether it decodes."""

    request: RequestRow
    place: int
    start: int
    length: int
    decodes: bool


class SlotHistory(TokenHistory):
    """What the requests in the slots were fed; a table has `slots` rows, whatever the batch."""

    def __init__(self, levels: Sequence[int] | None, fed: Fed, slots: int = 0) -> None:
        super().__init__(levels)
        self.slots = slots
        self._source = fed

    def rows_of(self, kv: KVView) -> int:
        return self.slots

    def add_slot(self) -> int:
        """Make room for one more; its number."""
        for table in self.tables.values():
            table.add_row()
        self.slots += 1
        return self.slots - 1

    def read(self, rows: Tensor, slots: Tensor) -> Tensor:
        return self._source.read(rows, slots)


class SlotIndexes:
    """The indexes of all requests of a worker, by layer, brought up to date between its steps.

    Args:
        plan: whose selector makes them.
        levels: delimiter levels of the vocabulary.
        view: a layer's cache as some rows see it.
    """

    build_seconds = 0.0

    def __init__(self, plan: Plan, levels: Sequence[int] | None, fed: Fed, view: Callable[[int, Rows], KVView]) -> None:
        self._plan, self._view, self._fed = plan, view, fed
        self._history = SlotHistory(levels, fed)
        self._layers: dict[int, SlotIndex] = {}
        self._held: tuple[list[int], Tensor] | None = None
        self.free: list[int] = []

    def take_in(self, arrivals: Sequence[Arrival], rows: Callable[[Sequence[int]], Rows]) -> None:
        """Bring the indexes of a step's requests up to date with what is in the cache before it.

        `rows` says where some of the arrivals lie, by their numbers, with lengths known on the host.
        """
        selector = self._plan.selector
        assert selector is not None, "only selectors have indexes"
        self._begin(arrivals, rows)
        # What a prompt's chunk computes may be taken in beside the next one, which takes far longer.
        left = max(SLICE, sum(one.length - one.start for one in arrivals))
        little, much = list[tuple[Feed, int]](), list[tuple[Feed, int]]()
        for number, one in enumerate(arrivals):
            memory: SlotMemory = one.request.memory
            # A prompt may find blocks that another request computes in this very step.
            ahead = 0 if memory.slot is None else left
            memory.slot = self._enter() if memory.slot is None else memory.slot
            kept = min(memory.rewritten, one.start)
            stop = selector.stop(one.length, min(one.start, memory.clean))
            known = min(self._stop(memory.slot), kept, stop)
            if not one.decodes:
                stop = min(known + ahead, stop)
                left -= stop - known
            if selector.reads_text:
                self._fed.feed(memory.slot, one.request, one.place, stop)
            feed = Feed(memory.slot, 0, kept, stop)
            (little if stop - known <= LITTLE else much).append((feed, number))
            memory.rewritten = one.length
        for some in filter(None, (little, much)):  # as much is planted of every row as of the one that brings most
            self._bring([feed for feed, _ in some], [number for _, number in some], rows)

    def narrow(self, requests: Sequence[RequestRow], device: torch.device) -> None:
        """Let the step at hand search the indexes of these requests, row by row."""
        slots = [request.memory.slot for request in requests]
        if self._held is None or self._held[0] != slots:
            self._held = slots, async_tensor_h2d(slots, device, torch.int32)
        self._search(self._held)

    def begin(self, past: int) -> None:
        """Nothing to forget: every request says what was rewritten."""

    def of(self, layer: int, kv: KVView) -> SlotIndex | None:
        """The layer's index, narrowed to the rows of the step; None before anything was taken in."""
        return self._layers.get(layer)

    def permute(self, layer: int, rows: Tensor) -> None:
        """Nothing to move: rows bring their slots."""

    @property
    def nbytes(self) -> int:
        return self._history.nbytes + sum(index.nbytes for index in self._layers.values())

    def _begin(self, arrivals: Sequence[Arrival], rows: Callable[[Sequence[int]], Rows]) -> None:
        """Make an index for every layer; where nobody is, room that the longest request needed is given back."""
        selector, missing = self._plan.selector, self._plan.refreshing - self._layers.keys()
        if len(self.free) == self._history.slots:
            self.free.clear()
            self._layers, self._history = {}, SlotHistory(self._history.levels, self._fed)
            missing = self._plan.refreshing
        if missing and arrivals and selector is not None:
            where = rows(range(len(arrivals)))
            for layer in sorted(missing):
                # `checks` refuses indexes that follow one cache.
                self._layers[layer] = cast(SlotIndex, selector.new_index(self._view(layer, where), self._history))

    def _bring(self, feeds: list[Feed], numbers: list[int], rows: Callable[[Sequence[int]], Rows]) -> None:
        """Cut and take in what some arrivals, which have these numbers, were fed."""
        for table in self._history.tables.values():
            table.bring(feeds)
        self._plant([feed.row for feed in feeds], lambda chosen: rows([numbers[one] for one in chosen]))

    def _plant(self, slots: list[int], rows: Callable[[Sequence[int]], Rows]) -> None:
        """Take in what has changed in `slots`, which are those of the arrivals."""
        if not any(index.stale for index in self._layers.values()):
            return
        where = rows(range(len(slots)))
        for layer, index in self._layers.items():
            index.plant(self._view(layer, where), slots)

    def _search(self, held: tuple[list[int], Tensor]) -> None:
        for index in self._layers.values():
            index.slots = held

    def _stop(self, slot: int) -> int:
        """How many tokens of a slot were looked at."""
        return min((table.stops[slot] for table in self._history.tables.values()), default=0)

    def _enter(self) -> int:
        """The lowest slot that nobody has; one more if all are taken. What was in it is forgotten."""
        if not self.free:
            self.free.append(self._history.add_slot())
            return heapq.heappop(self.free)
        slot = heapq.heappop(self.free)
        for table in self._history.tables.values():
            table.clear(slot)
        for index in self._layers.values():
            index.clear(slot)
        return slot


class FixedIndexes(SlotIndexes):
    """Indexes in memory that was set aside for as many requests as there may be, which captured steps search.

    Its last slot is nobody's and empty: rows that are no request's, or do not search, are in it.

    Args:
        reserved: the memory; its tables know no other text than that of this object from now on.
        rows: the most that a batch has, with its padding.
    """

    def __init__(
        self,
        plan: Plan,
        levels: Sequence[int] | None,
        fed: Fed,
        view: Callable[[int, Rows], KVView],
        reserved: Reserved,
        rows: int,
    ) -> None:
        super().__init__(plan, levels, fed, view)
        table = reserved.table
        slots = len(table.stops) - 1
        self._history, self._reserved, self._nobody = SlotHistory(levels, fed, slots + 1), reserved, slots
        if table.source is not None:
            table.source = self._history
        self._history.tables[table.cuts, True] = table
        self._layers.update(reserved.layers)
        self.free.extend(range(slots))
        self._places = torch.full((rows,), slots, dtype=torch.int32, device=table.edges.device)
        self._known, self._warm = [slots] * rows, False

    def warm_up(self, rows: Rows) -> None:
        """Compile what taking text in needs, before a request does; `rows` is any one."""
        if not self._warm:
            self._reserved.warm_up({layer: self._view(layer, rows) for layer in self._layers})
        self._warm = True

    def place(self, requests: Sequence[RequestRow | None], rows: int) -> None:
        """Let a step of so many rows search the indexes of its first rows' requests; None: it does not search."""
        found = [None if one is None or one.memory is None else one.memory.slot for one in requests]
        slots = [self._nobody if slot is None else slot for slot in (*found, *[None] * (rows - len(found)))]
        if self._known[:rows] != slots:
            self._known[:rows] = slots
            self._places[:rows].copy_(async_tensor_h2d(slots, self._places.device, torch.int32))
        # Always the same memory, which a graph reads.
        self._search((slots, self._places[:rows]))

    def _begin(self, arrivals: Sequence[Arrival], rows: Callable[[Sequence[int]], Rows]) -> None:
        """All is there."""

    def _plant(self, slots: list[int], rows: Callable[[Sequence[int]], Rows]) -> None:
        def seen(chosen: Sequence[int]) -> dict[int, KVView]:
            where = rows([slots.index(slot) for slot in chosen])
            return {layer: self._view(layer, where) for layer in self._layers}

        if self._reserved.stale:
            self._reserved.plant(seen)

    def _enter(self) -> int:
        slot = heapq.heappop(self.free)
        self._reserved.clear(slot)
        return slot
