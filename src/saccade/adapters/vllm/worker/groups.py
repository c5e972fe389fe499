"""Which rows of a step select, and in which groups they decode; what is remembered of them from step to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from ....decode.kept import KeptSteps
from ....decode.recall import OfRows
from ....decode.state import DecodeState, Observer
from ....selection.selector import Reserved
from ....types import KVView, Rows, Workspace
from ..options import shape_of
from .fed import Fed, FedByDevice, FedByHost
from .requests import RequestRow, requests_of
from .slots import Arrival, FixedIndexes, SlotIndexes, SlotMemory
from .worker import serving_of


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows that decode together; `tokens`, int64, are their positions of the flat batch; None: all, in order."""

    state: DecodeState
    rows: Rows
    tokens: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows as the host knows them.

    Attributes:
        lengths: tokens of each row, those of this step included.
        queries: how many of them are new.
        prefilling: whether some of the prompt was still missing before this step.
        slots: the row's place among the worker's requests.
        placed: whether vLLM has said so.
    """

    lengths: list[int]
    queries: list[int]
    prefilling: list[bool]
    slots: list[int]
    placed: bool = True

    def rows(self, chosen: list[int], table: Tensor, lengths: Tensor, *, longest: int | None = None) -> Rows:
        """Some rows, whose blocks and lengths are given.

        `longest`: a bound on any row's length, where kernels are compiled for it; None: what the host knows of each.
        """
        if longest is not None:
            # None is whole, which is said as decoding steps say it: they are the same kernels then.
            whole = torch.zeros_like(lengths, dtype=torch.bool)
            return Rows(table, torch.zeros_like(lengths), lengths, longest, whole=whole)
        known = [self.lengths[row] for row in chosen]
        return Rows(table, torch.zeros_like(lengths), lengths, max(known), tuple((0, length) for length in known))

    def picked(self, chosen: list[int], table: Tensor, lengths: Tensor) -> Rows:
        """Some rows of a step, whose blocks and lengths of all rows are given; the host knows their lengths."""
        where = async_tensor_h2d(chosen, table.device, torch.int64)
        return self.rows(chosen, table.index_select(0, where), lengths.index_select(0, where))

    def decodes(self, row: int, request: RequestRow) -> bool:
        """Whether a row decodes under the policy, whatever its length: one token behind the prompt, not opted out."""
        return self.queries[row] == 1 and not self.prefilling[row] and request.sparse


class Groups:
    """Groups the rows of one step after the other.

    Args:
        view: a layer's cache as some rows see it.
        longest: a bound on the length of any row, where steps must not depend on lengths; None: they may.
        reserved: memory of the indexes, if it was set aside.
        rows: the most that a batch has, with its padding, where indexes are in such memory.
        workspace: of all steps, which follow each other; None: there is none.
    """

    def __init__(
        self,
        vllm_config: Any,
        view: Callable[[int, Rows], KVView],
        *,
        longest: int | None = None,
        reserved: Reserved | None = None,
        rows: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        self._config, self._longest = vllm_config, longest
        self._serving = serving = serving_of(vllm_config)
        self._view = view
        self._reserved, self._most = reserved, rows
        self._slots: SlotIndexes | None = None
        self._state = DecodeState(
            serving.plan, serving.counters, exhaustive_is_dense=False, indexes=serving.indexes, workspace=workspace
        )
        self._measured = 0.0
        self._kept: KeptSteps | None = None
        self._sampled: tuple[Rows, list[bool]] | None = None

    @property
    def captured(self) -> bool:
        """Whether decoding steps may be captured: what they run is then compiled with them, and runs in others too."""
        return self._longest is not None

    @property
    def leaves_layers(self) -> bool:
        """Whether captured steps leave layers to vLLM's kernel, since all heads of these are dense."""
        return self.captured and any(self._serving.plan.roles.passive)

    def covers(self, length: int) -> bool:
        """Whether vLLM's own kernel serves a row of `length` tokens, because every head attends to all of them."""
        selector = self._serving.plan.selector
        return selector is None or (not self.captured and selector.covers(length))

    def follow(self, batch: Batch, table: Tensor, lengths: Tensor) -> None:
        """Bring indexes of text up to what is in the cache before a step, so that its rows may be asked for.

        Rows have blocks int32 `[B, n]` and lengths int32 `[B]`.
        """
        selector = self._serving.plan.selector
        if selector is None or not selector.owns_index:
            return
        if not self._announced(batch):
            if self._reserved is not None:
                self._fixed(table.device).warm_up(batch.picked([0], table, lengths))
            return
        indexes, arrivals, numbers = self._indexes(table.device), list[Arrival](), list[int]()
        for row, request in enumerate(self.requests(batch)):
            length, queries = batch.lengths[row], batch.queries[row]
            if not request.sparse or not queries:
                continue
            dense = queries > 1 or batch.prefilling[row]
            self._memory(request, indexes).written(length - queries, length, dense=dense)
            decodes = batch.decodes(row, request)
            if decodes or not selector.covers(length):
                arrivals.append(Arrival(request, batch.slots[row], length - queries, length, decodes))
                numbers.append(row)
        indexes.take_in(arrivals, lambda chosen: batch.picked([numbers[one] for one in chosen], table, lengths))

    def sparse_rows(self, batch: Batch) -> list[int]:
        """Rows that select in this step: one new token behind the prompt, not opted out, not covered."""
        rows = enumerate(self.requests(batch) if self._searches(batch) else ())
        return [row for row, request in rows if batch.decodes(row, request) and not self.covers(batch.lengths[row])]

    def whole(self, batch: Batch) -> list[bool]:
        """Which rows of a step of one new token each do not decode under the policy; not those that pad the batch."""
        known, searches = self._announced(batch), self._searches(batch)
        decoding = [searches and batch.decodes(row, request) for row, request in enumerate(self.requests(batch))]
        chosen = [row for row, decodes in enumerate(decoding) if decodes]
        self._report(batch, chosen, known=known)
        self._serving.attended.begin(bool(chosen) or not known, len(decoding), warms=not known)
        return [queries == 1 and not decodes for queries, decodes in zip(batch.queries, decoding, strict=True)]

    def all_of(self, batch: Batch, whole: list[bool], rows: Rows) -> Group:
        """All rows of a step, in order; those that are `whole` search no index."""
        if self._reserved is not None:
            known = self._announced(batch)
            pairs = zip(self.requests(batch), batch.queries, whole, strict=True)
            searching = [one if known and queries and not other else None for one, queries, other in pairs]
            self._fixed(rows.seq_lens.device).place(searching, rows.batch)
        self._state.observers = () if self._kept is None else (self._kept,)
        self._state.begin(0)
        return Group(self._state, rows, None)

    def keep(self, rows: int) -> None:
        """Where recall is measured, keep what captured steps of so many rows choose."""
        if self._serving.recall is not None:
            self._kept = KeptSteps(self._serving.plan, shape_of(self._config).group, rows)

    def sample(self, batch: Batch, whole: list[bool], rows: Rows) -> None:
        """Note the step at hand, if recall is to be measured in it: what is remembered of its rows is a copy."""
        selector = self._serving.plan.selector
        if self._kept is None or selector is None:
            return
        decoding = [
            queries == 1 and not other and not selector.covers(length)
            for queries, other, length in zip(batch.queries, whole, batch.lengths, strict=True)
        ]
        if not self._announced(batch) or not any(decoding) or not self._measures():
            return
        count, longest = sum(queries == 1 for queries in batch.queries), max(batch.lengths)
        table, starts, lengths = (held[:count].clone() for held in (rows.page_table, rows.row_start, rows.seq_lens))
        self._sampled = Rows(table, starts, lengths, longest), decoding[:count]

    def measure_kept(self) -> None:
        """Measure recall in the step before this one, if it was sampled."""
        recall, sampled = self._serving.recall, self._sampled
        if recall is None or self._kept is None or sampled is None:
            return
        self._sampled = None
        self._kept.measure(recall, sampled[0], self._view, sampled[1])
        if self._serving.metrics is not None:
            self._serving.metrics.measured(sum(sampled[1]))

    def of(self, batch: Batch, sparse: list[int], table: Tensor, lengths: Tensor, tokens: Tensor | None) -> list[Group]:
        """How the step's S sparse rows decode.

        Their blocks are int32 `[S, n]`, their lengths int32 `[S]`, `tokens` int64 `[S]` their positions in the flat
        batch; None: all, in order.
        """
        known = self._announced(batch)
        self._report(batch, sparse, known=known)
        self._serving.attended.begin(bool(sparse))
        selector = self._serving.plan.selector
        if not sparse:
            return []
        rows = batch.rows(sparse, table, lengths, longest=self._longest)
        if selector is not None and selector.owns_index:
            self._indexes(table.device).narrow(self.requests(batch, sparse), table.device)
        self._state.observers = self._observers([batch.lengths[row] for row in sparse]) if known else ()
        self._state.begin(0)
        return [Group(self._state, rows, tokens)]

    def _observers(self, lengths: list[int]) -> tuple[Observer, ...]:
        """Who sees the step at hand, in rows of these lengths: recall is measured where the budget does not cover."""
        recall, selector = self._serving.recall, self._serving.plan.selector
        if recall is None or selector is None:
            return ()
        counted = [not selector.covers(length) for length in lengths]
        if not any(counted) or not self._measures():
            return ()
        if self._serving.metrics is not None:
            self._serving.metrics.measuring(sum(counted))
        return (OfRows(recall, counted, max(lengths)),)

    def requests(self, batch: Batch, rows: list[int] | None = None) -> list[RequestRow]:
        """The requests of some rows, or of all."""
        slots = batch.slots if rows is None else [batch.slots[row] for row in rows]
        known = requests_of(self._config)
        return [RequestRow() for _ in slots] if known is None else known.of(slots)

    def _announced(self, batch: Batch) -> bool:
        """Whether the batch is of requests; else it is a warm-up, or metadata for a capture.

        Model runner V2 places dummy rows in slots that requests have had, but a row that decodes has a prompt.
        """
        known = requests_of(self._config)
        if known is None or (known.ids_on_device is not None and not batch.placed):
            return False
        rows = zip(batch.lengths, batch.queries, batch.prefilling, strict=True)
        if any(queries and not prefilling and length == queries for length, queries, prefilling in rows):
            return False
        return all(slot in known.rows for slot, queries in zip(batch.slots, batch.queries, strict=True) if queries)

    def _report(self, batch: Batch, sparse: list[int], *, known: bool) -> None:
        metrics = self._serving.metrics
        if metrics is None:
            return
        if not known:
            metrics.disregard()
            return
        chosen = set(sparse)
        dense = [
            batch.lengths[row]
            for row, request in enumerate(self.requests(batch))
            if row not in chosen and request.sparse and request.decodes(batch.queries[row], batch.prefilling[row])
        ]
        metrics.step([batch.lengths[row] for row in sparse], dense)

    def _searches(self, batch: Batch) -> bool:
        """Whether rows can be searched: where that takes an index of its own, those of requests alone."""
        selector = self._serving.plan.selector
        return selector is None or not selector.owns_index or self._announced(batch)

    def _memory(self, request: RequestRow, indexes: SlotIndexes) -> SlotMemory:
        if request.memory is None:
            request.memory = SlotMemory(self._serving.options.policy.phase, indexes.free)
        memory: SlotMemory = request.memory
        return memory

    def _indexes(self, device: torch.device) -> SlotIndexes:
        """Made once the worker knows its requests, whose tokens they read."""
        if self._slots is None:
            requests, serving = requests_of(self._config), self._serving
            assert requests is not None, "vLLM makes its logits processors before any step"
            ids = requests.ids_on_device
            fed: Fed = FedByHost(device) if ids is None else FedByDevice(ids)
            given = serving.plan, serving.levels, fed, self._view
            reserved, most = self._reserved, self._most
            self._slots = SlotIndexes(*given) if reserved is None else FixedIndexes(*given, reserved, most)
            self._state.indexes = self._slots
        return self._slots

    def _fixed(self, device: torch.device) -> FixedIndexes:
        """Those in memory that was set aside."""
        indexes = self._indexes(device)
        assert isinstance(indexes, FixedIndexes), "memory was set aside for them"
        return indexes

    def _measures(self) -> bool:
        """Whether recall is measured in this step: evenly spread, without chance."""
        self._measured += self._serving.options.recall
        if self._measured < 1:
            return False
        self._measured -= 1
        return True
