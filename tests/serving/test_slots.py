"""Indexes of text of many requests: the same sets as of each alone, wherever vLLM keeps the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.slots import Fed, FedByDevice, FedByHost, SlotIndexes, SlotMemory
from saccade.plans.plan import Plan, layer_roles
from saccade.plans.rectify import Phase
from saccade.selection.chunks.selector import ChunkSelector
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.history import TokenHistory
from saccade.selection.selector import NewTokens
from saccade.types import KVView, ModelShape, Rows

LEVELS = (0, 0, 0, 1, 2, 3, 4)
REQUESTS, LENGTH, HEADS, DIM = 7, 260, 2, 16
SELECTORS = [
    ClusterSelector(budget=40, sinks=3, buffer=12, chunk_min=3, chunk_max=6, replant=7),
    ChunkSelector(budget=40, page=6),
]


class World:
    """Requests whose tokens and keys are known, in a cache of one page each."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.k = torch.randn(REQUESTS, LENGTH, HEADS, DIM)
        self.ids = torch.randint(len(LEVELS), (REQUESTS, LENGTH))
        self.lengths = [random.Random(seed + number).randrange(30, 150) for number in range(REQUESTS)]

    def rows(self, requests: list[int]) -> Rows:
        table = torch.tensor(requests, dtype=torch.int32)[:, None]
        return Rows.on_host(table, [0] * len(requests), [self.lengths[request] for request in requests])

    def view(self, layer: int, rows: Rows) -> KVView:
        return KVView(self.k, self.k, rows)

    def alone(self, selector: Any, request: int, q: Tensor) -> Tensor:
        """The set of a request that was all there at once."""
        kv = self.view(0, self.rows([request]))
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


@pytest.mark.parametrize("selector", SELECTORS, ids=["clusters", "chunks"])
@pytest.mark.parametrize("way", [by_host, by_device])
@pytest.mark.parametrize("seed", [0, 1])
def test_requests_come_and_go(selector: Any, way: Any, seed: int) -> None:
    world, numbers = World(seed), random.Random(seed)
    fed, made = way(world)
    plan = Plan(selector, layer_roles(ModelShape(2, 4, HEADS, DIM), 1))
    indexes = SlotIndexes(plan, LEVELS, fed, world.view)
    here: dict[int, RequestRow] = {}
    highest = 0
    for step in range(90):
        if step % 6 == 0:
            for request in [*here]:
                if numbers.random() < 0.5:
                    here.pop(request).memory.leave()
            away = [request for request in range(REQUESTS) if request not in here]
            for request in numbers.sample(away, min(len(away), 4 - len(here))):
                here[request] = made(request)
                here[request].memory = SlotMemory(Phase(None), indexes.free)
        batch = [request for request in here if world.lengths[request] > selector.budget]
        if not batch:
            continue
        rows, q = world.rows(batch), torch.randn(len(batch), 2 * HEADS, DIM)
        indexes.take_in(rows, [here[request] for request in batch], batch)
        highest = max(highest, *(here[request].memory.slot for request in batch))
        kv = world.view(1, rows)
        chosen = selector.select(q, kv, indexes.of(1, kv), None, 1.0)
        for row, request in enumerate(batch):
            assert present(chosen, row).equal(world.alone(selector, request, q[row : row + 1]))
            world.lengths[request] += world.lengths[request] < LENGTH
            here[request].memory.written(world.lengths[request] - 1, world.lengths[request], dense=False)
    assert highest == 3, "slots are taken over"
    assert indexes.nbytes > 0 and indexes.of(0, kv) is None


def test_what_is_written_anew_is_taken_in_anew() -> None:
    """A request that is set back, as by a scheduler that preempts, and goes on with other tokens."""
    selector, world = SELECTORS[0], World(3)
    world.lengths = [150] * REQUESTS
    fed, made = by_host(world)
    indexes = SlotIndexes(Plan(selector, layer_roles(ModelShape(2, 4, HEADS, DIM), 1)), LEVELS, fed, world.view)
    request = made(2)
    request.memory = SlotMemory(Phase(None), indexes.free)
    indexes.take_in(world.rows([2]), [request], [2])
    world.k[2, 90:] = torch.randn(LENGTH - 90, HEADS, DIM)
    request.memory.written(90, 150, dense=True)
    indexes.take_in(world.rows([2]), [request], [2])
    q, kv = torch.randn(1, 2 * HEADS, DIM), world.view(1, world.rows([2]))
    assert present(selector.select(q, kv, indexes.of(1, kv), None, 1.0), 0).equal(world.alone(selector, 2, q))


@pytest.mark.parametrize("selector", SELECTORS, ids=["clusters", "chunks"])
def test_a_row_within_the_budget_has_a_slot_too(selector: Any) -> None:
    """Where rows that the budget covers decode by our own operations."""
    world = World(4)
    world.lengths = [20] * REQUESTS
    fed, made = by_host(world)
    indexes = SlotIndexes(Plan(selector, layer_roles(ModelShape(2, 4, HEADS, DIM), 1)), LEVELS, fed, world.view)
    for batch in ([0], [0, 1], [0, 1, 2]):
        requests = [made(request) for request in batch]
        for request in requests:
            request.memory = SlotMemory(Phase(None), indexes.free)
        indexes.take_in(world.rows(batch), requests, batch)
        kv = world.view(1, world.rows(batch))
        chosen = selector.select(torch.randn(len(batch), 2 * HEADS, DIM), kv, indexes.of(1, kv), None, 1.0)
        assert chosen.counts.eq(20).all()
        for request in requests:
            request.memory.leave()


def test_clean_follows_the_phase() -> None:
    memory = SlotMemory(Phase(4), [])
    memory.written(0, 50, dense=True)
    assert memory.clean == 50
    for position in range(50, 54):
        memory.written(position, position + 1, dense=False)
        assert memory.clean == 50
    memory.written(50, 55, dense=True)
    assert memory.clean == 55 and memory.rewritten == 0
