"""Requests whose tokens and keys are known, and what an index of each of them alone would choose."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.adapters.vllm.worker.fed import Fed, FedByDevice, FedByHost
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.slots import Arrival, SlotIndexes
from saccade.plans.plan import Plan, layer_roles
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.history import TokenHistory
from saccade.selection.selector import NewTokens
from saccade.types import KVView, ModelShape, Rows

LEVELS = (0, 0, 0, 1, 2, 3, 4)
REQUESTS, LENGTH, LAYERS, HEADS, DIM = 7, 260, 4, 2, 16
CLUSTERS = ClusterSelector(budget=40, sinks=3, buffer=12, chunk_min=3, chunk_max=6, replant=7)


class World:
    """Requests whose tokens and keys are known, in a cache of one page each."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.k = torch.randn(LAYERS, REQUESTS, LENGTH, HEADS, DIM)
        self.ids = torch.randint(len(LEVELS), (REQUESTS, LENGTH))
        self.lengths = [random.Random(seed + number).randrange(30, 150) for number in range(REQUESTS)]

    def rows(self, requests: list[int]) -> Rows:
        table = torch.tensor(requests, dtype=torch.int32)[:, None]
        return Rows.on_host(table, [0] * len(requests), [self.lengths[request] for request in requests])

    def view(self, layer: int, rows: Rows) -> KVView:
        return KVView(self.k[layer], self.k[layer], rows)

    def plan(self, selector: Any) -> Plan:
        """Its first layer is dense."""
        return Plan(selector, layer_roles(ModelShape(LAYERS, 2 * HEADS, HEADS, DIM), 1))

    def queries(self, rows: int) -> Tensor:
        return torch.randn(rows, 2 * HEADS, DIM)

    def take_in(self, indexes: SlotIndexes, requests: list[int], known: list[RequestRow], places: list[int]) -> None:
        """One step in which each of the requests decodes a token, and searches."""
        arrivals = [
            Arrival(row, place, self.lengths[request] - 1, self.lengths[request], decodes=True)
            for request, row, place in zip(requests, known, places, strict=True)
        ]
        indexes.take_in(arrivals, lambda chosen: self.rows([requests[number] for number in chosen]))
        indexes.narrow(known, self.k.device)

    def alone(self, selector: Any, request: int, q: Tensor, layer: int = 1) -> Tensor:
        """The set of a request that was all there at once."""
        kv = self.view(layer, self.rows([request]))
        history = TokenHistory(LEVELS)
        history.record(0, LENGTH, 1, self.ids[request : request + 1], None)
        index = selector.new_index(kv, history)
        index.update(kv, NewTokens(kv.rows, self.lengths[request]))
        return present(selector.select(q, kv, index, None, 1.0), 0)


def present(chosen: Any, row: int) -> Tensor:
    """Ids of the first head's set, without padding."""
    found: Tensor = chosen.ids[row, 0, : int(chosen.counts[row, 0])]
    return found


def by_host(world: World) -> tuple[Fed, Callable[[int], RequestRow]]:
    """As model runner V1: prompts and outputs are lists."""

    def row(request: int) -> RequestRow:
        ids = world.ids[request].tolist()
        return RequestRow(prompt=ids[:29], output=ids[29:])

    return FedByHost(torch.device("cpu")), row


def by_device(world: World) -> tuple[Fed, Callable[[int], RequestRow]]:
    """As model runner V2: all ids are in one tensor, by slots of its own."""
    return FedByDevice(world.ids.int()), lambda _: RequestRow()
