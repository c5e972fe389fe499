"""What all attention layers of one worker share: the plan, the state, and what each step does with each row."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....decode.counters import Counters
from ....decode.recall import RecallObserver
from ....decode.state import AttentionOperations, DecodeState
from ....plans.plan import Plan
from ....selection.history import TokenHistory
from ....types import Rows
from ..clean import covered_length
from ..metrics import StepMetrics
from ..options import ServeOptions
from .page_bounds import PagedIndexes
from .requests import RequestRow, requests_of
from .sequence_memory import SequenceMemory

logger = logging.getLogger("saccade")


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows that decode together.

    Attributes:
        state: theirs.
        rows: where their tokens lie.
        tokens: int64, which positions of the flat batch are theirs; None: all, in order.
    """

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
    """

    lengths: list[int]
    queries: list[int]
    prefilling: list[bool]
    slots: list[int]


class Serving:
    """Decoding under one policy in one worker.

    Args:
        options: of the engine.
        plan: of this rank's heads.
        vllm_config: through which the requests are found.
        levels: delimiter levels of the vocabulary, for policies that read text.
    """

    def __init__(self, options: ServeOptions, plan: Plan, vllm_config: Any, levels: Any = None) -> None:
        self.options = options
        self.plan = plan
        self.indexes = PagedIndexes()
        self.counters = Counters(len(plan.roles.layers), by_row=True)
        self.recall = RecallObserver(len(plan.roles.layers)) if options.recall else None
        self.metrics: StepMetrics | None = None
        self._config = vllm_config
        self._levels = levels
        self._state = DecodeState(plan, self.counters, exhaustive_is_dense=False, indexes=self.indexes)
        self._measured = 0.0

    @property
    def attention(self) -> AttentionOperations:
        """What rows that select attend with."""
        return self._state.attention

    @attention.setter
    def attention(self, operations: AttentionOperations) -> None:
        self._state.attention = operations

    @cached_property
    def covered(self) -> int:
        """The longest row of which every head attends to all tokens."""
        return covered_length(self.plan.selector, self._config.model_config.max_model_len)

    @property
    def page(self) -> int | None:
        """The page of bounds that lie in the cache; None if there are none."""
        return None if self.plan.selector is None else self.plan.selector.bounds_page

    @cached_property
    def by_sequence(self) -> bool:
        """Whether each request has an index of its own, beside the block tables."""
        return self.plan.selector is not None and self.plan.selector.owns_index

    def sparse_rows(self, batch: Batch) -> list[int]:
        """Rows that select in this step: one new token behind the prompt, not opted out, longer than the budget."""
        selector = self.plan.selector
        if selector is None:
            return []
        requests = self.requests(batch)
        return [
            row
            for row, (length, queries, prefilling) in enumerate(
                zip(batch.lengths, batch.queries, batch.prefilling, strict=True)
            )
            if queries == 1
            and not prefilling
            and requests[row].sparse
            and not (self.options.shortcut and selector.covers(length))
        ]

    def groups(
        self, batch: Batch, sparse: list[int], table: Tensor, lengths: Tensor, tokens: Tensor | None
    ) -> list[Group]:
        """How the step's sparse rows decode.

        Args:
            batch: all rows.
            sparse: which of them select.
            table: int32 `[len(sparse), n]`, their blocks.
            lengths: int32 `[len(sparse)]`.
            tokens: int64 `[len(sparse)]`, their positions in the flat batch; None: all, in order.
        """
        known = self._announced(batch)
        measured = self.recall is not None and known and bool(sparse) and self._measures()
        observers = (self.recall,) if self.recall is not None and measured else ()
        if self.metrics is not None:
            self._report(self.metrics, batch, sparse, known=known, measured=measured)
        if not self.by_sequence:
            if not sparse:
                return []
            self._state.observers = observers
            self._state.begin(0)
            rows = _rows(batch, sparse, table, lengths, on_host=table.is_cpu)
            return [Group(self._state, rows, tokens)]
        self._follow(batch)
        groups = []
        for place, (row, request) in enumerate(zip(sparse, self.requests(batch, sparse), strict=True)):
            memory = self._memory(request)
            memory.begin(request, batch.lengths[row])
            memory.state.observers = observers
            own = slice(place, place + 1)
            position = torch.arange(place, place + 1, device=table.device) if tokens is None else tokens[own]
            # An index of text is cut by code on the host, which would else ask the device how long the row is.
            rows = _rows(batch, [row], table[own], lengths[own], on_host=True)
            groups.append(Group(memory.state, rows, position))
        return groups

    def requests(self, batch: Batch, rows: list[int] | None = None) -> list[RequestRow]:
        """The requests of some rows, or of all."""
        slots = batch.slots if rows is None else [batch.slots[row] for row in rows]
        known = requests_of(self._config)
        return [RequestRow() for _ in slots] if known is None else known.of(slots)

    def _announced(self, batch: Batch) -> bool:
        """Whether the batch is of requests; else it is a warm-up."""
        known = requests_of(self._config)
        rows = zip(batch.slots, batch.queries, strict=True)
        return known is not None and all(slot in known.rows for slot, queries in rows if queries)

    def _report(self, metrics: StepMetrics, batch: Batch, sparse: list[int], *, known: bool, measured: bool) -> None:
        if not known:
            metrics.disregard()
            return
        chosen = set(sparse)
        dense = [
            batch.lengths[row]
            for row, request in enumerate(self.requests(batch))
            if row not in chosen and request.sparse and request.decodes(batch.queries[row], batch.prefilling[row])
        ]
        metrics.step([batch.lengths[row] for row in sparse], dense, measured=measured)

    def _follow(self, batch: Batch) -> None:
        """Tell every request's memory what this step writes."""
        for row, request in enumerate(self.requests(batch)):
            length, queries = batch.lengths[row], batch.queries[row]
            if request.sparse and queries:
                dense = queries > 1 or batch.prefilling[row]
                self._memory(request).written(length - queries, length, dense=dense)

    def _memory(self, request: RequestRow) -> SequenceMemory:
        if request.memory is None:
            history = TokenHistory(self._levels)
            state = DecodeState(
                self.plan, self.counters, exhaustive_is_dense=False, history=history, attention=self.attention
            )
            rectify = self.options.policy.rectify
            request.memory = SequenceMemory(state, None if rectify is None else rectify.every)
        memory: SequenceMemory = request.memory
        return memory

    def _measures(self) -> bool:
        """Whether recall is measured in this step: evenly spread, without chance."""
        self._measured += self.options.recall
        if self._measured < 1:
            return False
        self._measured -= 1
        return True


def _rows(batch: Batch, sparse: list[int], table: Tensor, lengths: Tensor, *, on_host: bool) -> Rows:
    known = [batch.lengths[row] for row in sparse]
    bounds = tuple((0, length) for length in known) if on_host else None
    return Rows(table, torch.zeros_like(lengths), lengths, max(known), bounds)
