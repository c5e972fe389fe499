"""Indexes of text of many requests: the same sets as of each alone, wherever vLLM keeps the tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from world import CLUSTERS, DIM, HEADS, LAYERS, LENGTH, LEVELS, REQUESTS, World, by_device, by_host, present

from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.slots import SlotIndexes, SlotMemory
from saccade.plans.rectify import Phase


@pytest.mark.parametrize("way", [by_host, by_device])
@pytest.mark.parametrize("seed", [0, 1])
def test_requests_come_and_go(way: Any, seed: int) -> None:
    selector, world, numbers = CLUSTERS, World(seed), random.Random(seed)
    fed, made = way(world)
    indexes = SlotIndexes(world.plan(selector), LEVELS, fed, world.view)
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
        rows, q = world.rows(batch), world.queries(len(batch))
        world.take_in(indexes, batch, [here[request] for request in batch], batch)
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
    selector, world = CLUSTERS, World(3)
    world.lengths = [150] * REQUESTS
    fed, made = by_host(world)
    indexes = SlotIndexes(world.plan(selector), LEVELS, fed, world.view)
    request = made(2)
    request.memory = SlotMemory(Phase(None), indexes.free)
    world.take_in(indexes, [2], [request], [2])
    world.k[:, 2, 90:] = torch.randn(LAYERS, LENGTH - 90, HEADS, DIM)
    request.memory.written(90, 150, dense=True)
    world.take_in(indexes, [2], [request], [2])
    q, kv = world.queries(1), world.view(1, world.rows([2]))
    assert present(selector.select(q, kv, indexes.of(1, kv), None, 1.0), 0).equal(world.alone(selector, 2, q))


def test_a_row_within_the_budget_has_a_slot_too() -> None:
    """Where rows that the budget covers decode by our own operations."""
    selector, world = CLUSTERS, World(4)
    world.lengths = [20] * REQUESTS
    fed, made = by_host(world)
    indexes = SlotIndexes(world.plan(selector), LEVELS, fed, world.view)
    for batch in ([0], [0, 1], [0, 1, 2]):
        requests = [made(request) for request in batch]
        for request in requests:
            request.memory = SlotMemory(Phase(None), indexes.free)
        world.take_in(indexes, batch, requests, batch)
        kv = world.view(1, world.rows(batch))
        chosen = selector.select(world.queries(len(batch)), kv, indexes.of(1, kv), None, 1.0)
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
