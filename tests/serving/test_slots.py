"""Indexes of text of many requests: the same sets as of each alone, wherever vLLM keeps the tokens."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from world import CLUSTERS, DIM, HEADS, LAYERS, LENGTH, REQUESTS, World, by_device, by_host, present

from saccade.adapters.vllm.options import CYCLES
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.verified import VerifiedMemory
from saccade.plans.rectify import Clean, Phase


@pytest.mark.parametrize(("way", "seed"), [(by_host, 0), (by_device, 1)])
def test_requests_come_and_go(way: Any, seed: int) -> None:
    selector, world, numbers = CLUSTERS, World(seed), random.Random(seed)
    fed, made = way(world)
    indexes = world.slots(selector, fed)
    here: dict[int, RequestRow] = {}
    highest = 0
    for step in range(90):
        if step % 6 == 0:
            for request in [*here]:
                if numbers.random() < 0.5 and (memory := here.pop(request).memory) is not None:
                    memory.leave()
            away = [request for request in range(REQUESTS) if request not in here]
            for request in numbers.sample(away, min(len(away), 4 - len(here))):
                here[request] = made(request)
        batch = [request for request in here if world.lengths[request] > selector.budget]
        if not batch:
            continue
        rows, q = world.rows(batch), world.queries(len(batch))
        world.step(indexes, here, dict.fromkeys(batch, 1))
        indexes.place([here[request] for request in batch], rows)
        highest = max(highest, *(here[request].memory.slot for request in batch))
        kv = world.view(1, rows)
        chosen = selector.select(q, kv, indexes.of(1, kv), None, 1.0)
        for row, request in enumerate(batch):
            assert present(chosen, row).equal(world.alone(selector, request, q[row : row + 1]))
            world.lengths[request] += world.lengths[request] < LENGTH
    assert highest == 3, "slots are taken over"
    assert indexes.nbytes > 0 and indexes.of(0, kv) is None
    for request in here.values():
        if request.memory is not None:
            request.memory.leave()
    assert indexes.nbytes == 0, "where nobody is, room is given back"


def test_what_is_written_anew_is_taken_in_anew() -> None:
    """A request that is set back, as by a scheduler that preempts, and goes on with other tokens."""
    selector, world = CLUSTERS, World(3)
    world.lengths = [150] * REQUESTS
    fed, made = by_host(world)
    indexes, here = world.slots(selector, fed), {2: made(2)}
    world.step(indexes, here, {2: 1})
    world.k[:, 2, 90:] = torch.randn(LAYERS, LENGTH - 90, HEADS, DIM)
    here[2].memory.wrote(90, 60, dense=True)
    world.step(indexes, here, {2: 1})
    q, kv = world.queries(1), world.view(1, world.rows([2]))
    indexes.place([here[2]], kv.rows)
    assert present(selector.select(q, kv, indexes.of(1, kv), None, 1.0), 0).equal(world.alone(selector, 2, q))


def test_who_leaves_before_it_is_asked_leaves_a_slot_like_any_other() -> None:
    """As a prompt that enters alone and is aborted."""
    world = World(5)
    fed, made = by_host(world)
    indexes, here = world.slots(CLUSTERS, fed), {0: made(0), 1: made(1), 2: made(2)}
    world.lengths = [150] * REQUESTS
    world.step(indexes, here, {0: 1})
    world.step(indexes, here, {1: 60})
    here[1].memory.leave()
    world.step(indexes, here, {0: 1, 2: 1})
    assert here[2].memory.slot == 1
    assert indexes.nbytes > 0


def test_a_row_within_the_budget_has_a_slot_too() -> None:
    """Where rows that the budget covers decode by our own operations."""
    selector, world = CLUSTERS, World(4)
    world.lengths = [20] * REQUESTS
    fed, made = by_host(world)
    indexes = world.slots(selector, fed)
    for batch in ([0], [0, 1], [0, 1, 2]):
        here = {request: made(request) for request in batch}
        world.step(indexes, here, dict.fromkeys(batch, 1))
        kv = world.view(1, world.rows(batch))
        indexes.place([*here.values()], kv.rows)
        assert selector.select(world.queries(len(batch)), kv, indexes.of(1, kv), None, 1.0).counts.eq(20).all()
        for request in here.values():
            request.memory.leave()


def test_what_may_yet_be_rejected_stands_in_no_index() -> None:
    """Not where vLLM schedules a step ahead and counts all of the one before as standing; but soon it does."""
    drafts = 4
    for seed, ahead in product(range(40), (False, True)):
        numbers, known, certain = random.Random(seed), 20 * (seed % 2), 90
        memory = VerifiedMemory(World(0).slots(CLUSTERS, by_host(World(0))[0]), Clean(Phase(drafts)), verified=known)
        counted = stands = known
        for _ in range(60):
            left = certain - stands
            # A prompt's last token may come padded by drafts that stand for nothing.
            count = min(left, 40) if left > 1 else 1 + numbers.choice((0, 1, drafts))
            assert memory.verifies(counted, count, certain) <= stands
            before, stands = stands, stands + (count if left > 1 else numbers.randint(1, count))
            counted = before + count if ahead else stands
            assert memory.verified <= stands
            assert left <= 1 or memory.verified == stands, "an end of a prompt is left out"
            assert stands + drafts <= memory.verified + CYCLES * drafts
