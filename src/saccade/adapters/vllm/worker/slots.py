"""Indexes of text: one tree a layer for all requests, which enter and leave its slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from ....plans.plan import Plan
from ....plans.rectify import Phase
from ....selection.chunk_table import Feed
from ....selection.history import ABSENT, ALL_CLEAN, UNKNOWN, TokenHistory
from ....selection.selector import SlotIndex
from ....types import KVView, Rows
from .requests import RequestRow

_GROWTH = 256


@dataclass(slots=True, eq=False)
class SlotMemory:
    """What is kept for a request between its steps.

    Attributes:
        phase: when a step is dense.
        free: slots that nobody has.
        clean: positions below it hold keys and values that no sparse step wrote, or that were rectified since.
        rewritten: first position written since the index was last brought up to date.
        slot: where its index is; None before it selects, and while it is not in the batch.
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


class Fed(Protocol):
    """Token ids of the requests in slots."""

    def feed(self, slot: int, request: RequestRow, place: int, stop: int) -> None:
        """Let the first `stop` tokens be read of a request, which is at `place` in vLLM's batch."""
        ...

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        """As `TokenHistory.read`."""
        ...


class FedByHost:
    """Copied from the host's lists, as model runner V1 keeps them."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._held: dict[int, tuple[RequestRow, int]] = {}

    def feed(self, slot: int, request: RequestRow, place: int, stop: int) -> None:
        held, known = self._held.get(slot, (None, 0))
        first = known if held is request else 0
        if stop <= first:
            return
        rows, width = max(slot + 1, self._ids.shape[0]), max(stop, self._ids.shape[1])
        if (rows, width) != self._ids.shape:
            width += max(width // 8, _GROWTH) if width > self._ids.shape[1] else 0
            wider = self._ids.new_full((rows, width), ABSENT)
            wider[: self._ids.shape[0], : self._ids.shape[1]] = self._ids
            self._ids = wider
        self._ids[slot, first:stop] = async_tensor_h2d(_tokens(request, first, stop), self._ids.device, torch.int32)
        self._held[slot] = request, stop

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self._ids[slots[:, None], positions.clamp(max=self._ids.shape[1] - 1)].long()


class FedByDevice:
    """Read where model runner V2 keeps them, int32 `[requests, positions]`; the host never sees them."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self._places = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        self._known = [-1] * ids.shape[0]

    def feed(self, slot: int, request: RequestRow, place: int, stop: int) -> None:
        if self._known[slot] != place:
            self._known[slot] = place
            self._places[slot].fill_(place)

    def read(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self._ids[self._places[slots][:, None], positions.clamp(max=self._ids.shape[1] - 1)].long()


class SlotHistory(TokenHistory):
    """What the requests in the slots were fed; a table has `slots` rows, whatever the batch."""

    def __init__(self, levels: Sequence[int] | None, fed: Fed) -> None:
        super().__init__(levels)
        self.slots = 0
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

    def take_in(self, rows: Rows, requests: Sequence[RequestRow], places: Sequence[int]) -> None:
        """Bring the indexes of rows that select up to date; they are at `places` in vLLM's batch."""
        selector = self._plan.selector
        assert rows.bounds is not None and selector is not None, "without speculation the host knows lengths"
        if len(self.free) == self._history.slots:
            # Nobody is here: room that the longest request needed is given back.
            self.free.clear()
            self._layers, self._history = {}, SlotHistory(self._history.levels, self._fed)
        slots, feeds = [], []
        for request, place, (_, length) in zip(requests, places, rows.bounds, strict=True):
            memory: SlotMemory = request.memory
            if memory.slot is None:
                memory.slot = self._enter()
            stop = selector.stop(length, min(length - 1, memory.clean))
            if selector.reads_text:
                self._fed.feed(memory.slot, request, place, stop)
            feeds.append(Feed(memory.slot, 0, min(memory.rewritten, length - 1), stop))
            slots.append(memory.slot)
            memory.rewritten = length
        if self._held is None or self._held[0] != slots:
            self._held = slots, async_tensor_h2d(slots, rows.seq_lens.device, torch.int32)
        for layer in sorted(self._plan.refreshing - self._layers.keys()):
            # `checks` refuses indexes that follow one cache.
            made = selector.new_index(self._view(layer, rows), self._history)
            self._layers[layer] = cast(SlotIndex, made)
        for table in self._history.tables.values():
            table.bring(feeds)
        for layer, index in self._layers.items():
            index.slots = self._held
            if index.stale:
                index.plant(self._view(layer, rows))

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

    def _enter(self) -> int:
        """The lowest slot that nobody has; one more if all are taken."""
        if not self.free:
            self.free.append(self._history.add_slot())
        return heapq.heappop(self.free)


def _tokens(request: RequestRow, start: int, stop: int) -> list[int]:
    """Token ids `start..stop` of a request; -1 (unknown) where the prompt came as embeddings."""
    if request.prompt is None:
        return [UNKNOWN] * (stop - start)
    first, last = (max(place - len(request.prompt), 0) for place in (start, stop))
    known = [*request.prompt[start:stop], *request.output[first:last]]
    return known + [UNKNOWN] * (stop - start - len(known))
