"""Which rows of a step select, and in which groups they decode; what is remembered of them from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....decode.state import AttentionOperations, DecodeState
from ....types import Rows
from .requests import RequestRow, requests_of
from .sequence_memory import SequenceMemory
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
    """

    lengths: list[int]
    queries: list[int]
    prefilling: list[bool]
    slots: list[int]

    def rows(self, chosen: list[int], table: Tensor, lengths: Tensor, *, on_host: bool) -> Rows:
        """Some rows, whose blocks and lengths are given; `on_host`: with bounds for code that runs there."""
        known = [self.lengths[row] for row in chosen]
        bounds = tuple((0, length) for length in known) if on_host else None
        return Rows(table, torch.zeros_like(lengths), lengths, max(known), bounds)


class Groups:
    """Groups the rows of one step after the other; those that select attend with `attention`."""

    def __init__(self, vllm_config: Any, attention: AttentionOperations) -> None:
        self.attention = attention
        self._config = vllm_config
        self._serving = serving = serving_of(vllm_config)
        self._by_sequence = serving.plan.selector is not None and serving.plan.selector.owns_index
        self._state = DecodeState(
            serving.plan, serving.counters, exhaustive_is_dense=False, indexes=serving.indexes, attention=attention
        )
        self._measured = 0.0

    def covers(self, length: int) -> bool:
        """Whether every head attends to all of a row of `length` tokens: then vLLM's own kernel serves it."""
        selector = self._serving.plan.selector
        return selector is None or selector.covers(length)

    def sparse_rows(self, batch: Batch) -> list[int]:
        """Rows that select in this step: one new token behind the prompt, not opted out, longer than the budget."""
        if self._serving.plan.selector is None:
            return []
        return [
            row
            for row, request in enumerate(self.requests(batch))
            if batch.queries[row] == 1 and not batch.prefilling[row]
            if request.sparse and not self.covers(batch.lengths[row])
        ]

    def of(self, batch: Batch, sparse: list[int], table: Tensor, lengths: Tensor, tokens: Tensor | None) -> list[Group]:
        """How the step's S sparse rows decode.

        Their blocks are int32 `[S, n]`, their lengths int32 `[S]`, `tokens` int64 `[S]` their positions in the flat
        batch; None: all, in order.
        """
        recall = self._serving.recall
        known = self._announced(batch)
        measured = recall is not None and known and bool(sparse) and self._measures()
        observers = (recall,) if recall is not None and measured else ()
        self._report(batch, sparse, known=known, measured=measured)
        if not self._by_sequence:
            if not sparse:
                return []
            self._state.observers = observers
            self._state.begin(0)
            return [Group(self._state, batch.rows(sparse, table, lengths, on_host=table.is_cpu), tokens)]
        self._follow(batch)
        groups = []
        for place, (row, request) in enumerate(zip(sparse, self.requests(batch, sparse), strict=True)):
            memory = self._memory(request)
            memory.begin(request, batch.lengths[row])
            memory.state.observers = observers
            own = slice(place, place + 1)
            position = torch.arange(place, place + 1, device=table.device) if tokens is None else tokens[own]
            # An index of text is cut by code on the host, which would else ask the device how long the row is.
            rows = batch.rows([row], table[own], lengths[own], on_host=True)
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

    def _report(self, batch: Batch, sparse: list[int], *, known: bool, measured: bool) -> None:
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
            request.memory = SequenceMemory.of(self._serving, self.attention)
        memory: SequenceMemory = request.memory
        return memory

    def _measures(self) -> bool:
        """Whether recall is measured in this step: evenly spread, without chance."""
        self._measured += self._serving.options.recall
        if self._measured < 1:
            return False
        self._measured -= 1
        return True
