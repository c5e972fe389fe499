"""Indexes of text of many requests, which grow or never move: the same sets as of each alone, wherever tokens are."""

import random
from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.adapters.vllm.options import CYCLES
from saccade.adapters.vllm.worker.batch import Batch
from saccade.adapters.vllm.worker.fed import RequestFeed
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.slots import RequestSlots, SlotMemory
from saccade.adapters.vllm.worker.verified import VerifiedMemory
from saccade.decode.slots import Slots
from saccade.decode.state import own_indexes
from saccade.plans.plan import Plan, layer_roles
from saccade.plans.rectify import ALL, Clean, Phase
from saccade.selection.clusters import index as index_module
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.index import KeySizes, SlotIndex
from saccade.text.history import TokenHistory
from saccade.types import KVView, ModelShape, Rows

LEVELS = (0, 0, 0, 1, 2, 3, 4)
REQUESTS, LENGTH, LAYERS, HEADS, DIM = 7, 260, 4, 2, 16
CLUSTERS = ClusterSelector(budget=40, sinks=3, buffer=12, chunk_min=3, chunk_max=6, replant=7)


def plan(selector: Any = CLUSTERS) -> Plan:
    """Its first layer is dense."""
    return Plan(selector, layer_roles(ModelShape(LAYERS, 2 * HEADS, HEADS, DIM), 1))


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

    def slots(self, text: RequestFeed, index: SlotIndex | None = None, **sizes: int) -> RequestSlots:
        return RequestSlots(plan(), Phase(None), text, self.view, index, **sizes)

    def step(
        self, slots: RequestSlots, here: dict[int, RequestRow], new: dict[int, int], prompts: Collection[int] = ()
    ) -> None:
        """Compute so many last tokens of requests, more than one or in `prompts` a prompt's; lengths are those then."""
        counts, lengths = [*new.values()], [self.lengths[request] for request in new]
        prefilling = [count > 1 or request in prompts for request, count in new.items()]
        requests = [here[request] for request in new]
        table, on_device = torch.tensor([*new], dtype=torch.int32)[:, None], torch.tensor(lengths, dtype=torch.int32)
        slots.follow(Batch(lengths, counts, prefilling, [*new], requests, True), table, on_device)

    def alone(self, request: int, q: Tensor, layer: int = 1) -> Tensor:
        """The set of a request that was all there at once."""
        kv, history = self.view(layer, self.rows([request])), TokenHistory(LEVELS)
        history.record(0, LENGTH, 1, self.ids[request : request + 1], None)
        indexes = own_indexes(plan(), history)
        indexes.begin(0, ALL)
        return present(CLUSTERS.select(q, kv, indexes.of(layer, kv), None, 1.0), 0)


def queries(rows: int) -> Tensor:
    return torch.randn(rows, 2 * HEADS, DIM)


def present(chosen: Any, row: int) -> Tensor:
    """Ids of the first head's set, without padding."""
    found: Tensor = chosen.ids[row, 0, : int(chosen.counts[row, 0])]
    return found


def by_host(world: World) -> tuple[RequestFeed, Callable[[int], RequestRow]]:
    """As model runner V1: prompts and outputs are lists."""

    def row(request: int) -> RequestRow:
        ids = world.ids[request].tolist()
        return RequestRow(prompt=ids[:29], output=ids[29:])

    return RequestFeed(LEVELS, lambda: None), row


def by_device(world: World) -> tuple[RequestFeed, Callable[[int], RequestRow]]:
    """As model runner V2: all ids are in one tensor, by slots of its own."""
    return RequestFeed(LEVELS, world.ids.int), lambda _: RequestRow()


@pytest.mark.parametrize(("way", "seed"), [(by_host, 0), (by_device, 1)])
def test_indexes_grow_with_requests_that_come_and_go(way: Any, seed: int) -> None:
    world, numbers, here, highest = World(seed), random.Random(seed), dict[int, RequestRow](), 0
    fed, made = way(world)
    indexes = world.slots(fed)
    for step in range(90):
        if step % 6 == 0:
            for request in [*here]:
                if numbers.random() < 0.5 and (memory := here.pop(request).memory) is not None:
                    memory.leave()
            away = [request for request in range(REQUESTS) if request not in here]
            for request in numbers.sample(away, min(len(away), 4 - len(here))):
                here[request] = made(request)
        if not (batch := [request for request in here if world.lengths[request] > CLUSTERS.budget]):
            continue
        rows, q = world.rows(batch), queries(len(batch))
        world.step(indexes, here, dict.fromkeys(batch, 1))
        indexes.place([here[request] for request in batch], rows)
        highest = max(highest, *(here[request].memory.slot for request in batch))
        kv = world.view(1, rows)
        chosen = CLUSTERS.select(q, kv, indexes.of(1, kv), None, 1.0)
        for row, request in enumerate(batch):
            assert present(chosen, row).equal(world.alone(request, q[row : row + 1]))
            world.lengths[request] += world.lengths[request] < LENGTH
    assert highest == 3, "slots are taken over"
    assert indexes.nbytes > 0 and indexes.of(0, kv) is None
    for request in here.values():
        if request.memory is not None:
            request.memory.leave()
    assert indexes.nbytes == 0, "where nobody is, room is given back"


def test_what_is_written_anew_is_taken_in_anew() -> None:
    """A request that is set back, as by a scheduler that preempts, and goes on with other tokens."""
    world = World(3)
    world.lengths = [150] * REQUESTS
    fed, made = by_host(world)
    indexes, here = world.slots(fed), {2: made(2)}
    world.step(indexes, here, {2: 1})
    world.k[:, 2, 90:] = torch.randn(LAYERS, LENGTH - 90, HEADS, DIM)
    here[2].memory.wrote(90, 60, dense=True)
    world.step(indexes, here, {2: 1})
    q, kv = queries(1), world.view(1, world.rows([2]))
    indexes.place([here[2]], kv.rows)
    assert present(CLUSTERS.select(q, kv, indexes.of(1, kv), None, 1.0), 0).equal(world.alone(2, q))


def test_who_leaves_before_it_is_asked_leaves_a_slot_like_any_other() -> None:
    """As a prompt that enters alone and is aborted."""
    world = World(5)
    fed, made = by_host(world)
    indexes, here = world.slots(fed), {0: made(0), 1: made(1), 2: made(2)}
    world.lengths = [150] * REQUESTS
    world.step(indexes, here, {0: 1})
    world.step(indexes, here, {1: 60})
    here[1].memory.leave()
    world.step(indexes, here, {0: 1, 2: 1})
    assert here[2].memory.slot == 1 and indexes.nbytes > 0


def test_a_row_within_the_budget_has_a_slot_too() -> None:
    """Where rows that the budget covers decode by our own operations."""
    world = World(4)
    world.lengths = [20] * REQUESTS
    fed, made = by_host(world)
    indexes = world.slots(fed)
    for batch in ([0], [0, 1], [0, 1, 2]):
        here = {request: made(request) for request in batch}
        world.step(indexes, here, dict.fromkeys(batch, 1))
        kv = world.view(1, world.rows(batch))
        indexes.place([*here.values()], kv.rows)
        assert CLUSTERS.select(queries(len(batch)), kv, indexes.of(1, kv), None, 1.0).counts.eq(20).all()
        for request in here.values():
            request.memory.leave()


def test_what_may_yet_be_rejected_stands_in_no_index() -> None:
    """Not where vLLM schedules a step ahead and counts all of the one before as standing; but soon it does."""
    drafts = 4
    for seed, ahead in product(range(40), (False, True)):
        numbers, known, certain = random.Random(seed), 20 * (seed % 2), 90
        memory = VerifiedMemory(World(0).slots(by_host(World(0))[0]), Clean(Phase(drafts)), verified=known)
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


SLOTS, ROWS = 3, 5


class Fixed:
    """Indexes of a world's requests with as few slots as there may be, and steps that search them."""

    def __init__(self, world: World, way: Any = by_device) -> None:
        fed, self.made = way(world)
        keys = KeySizes(HEADS, DIM, torch.float32, torch.device("cpu"))
        self.index: Any = plan().new_slots(keys, SLOTS + 1, longest=LENGTH, text=fed, fixed=True)
        self.world, self.slots = world, world.slots(fed, self.index, requests=SLOTS, rows=ROWS)
        self.here: dict[int, RequestRow] = {}

    def enter(self, request: int) -> RequestRow:
        self.here[request] = self.made(request)
        return self.here[request]

    def leave(self, request: int) -> None:
        if (memory := self.here.pop(request).memory) is not None:
            memory.leave()

    def step(self, new: dict[int, int], prompts: Collection[int] = ()) -> None:
        self.world.step(self.slots, self.here, new, prompts)

    def rows(self, requests: list[int]) -> Rows:
        """As a captured step has them: bounds are the longest row's, and rows behind the requests pad the batch."""
        table = torch.tensor([*requests, *[0] * (ROWS - len(requests))], dtype=torch.int32)[:, None]
        lengths = [*(self.world.lengths[request] for request in requests), *[0] * (ROWS - len(requests))]
        return Rows(table, torch.zeros(ROWS, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), LENGTH)

    def sets(self, requests: list[int], q: Tensor) -> list[Any]:
        """What every layer chooses for a padded batch."""
        found, rows = [], self.rows(requests)
        self.slots.place([self.here[request] for request in requests], rows)
        for layer in range(1, LAYERS):
            kv = self.world.view(layer, rows)
            found.append(CLUSTERS.select(q, kv, self.slots.of(layer, kv), None, 1.0))
        return found

    def check(self, requests: list[int]) -> None:
        """Every layer's sets are those of each request alone, as wide as the budget."""
        q = queries(ROWS)
        for layer, chosen in enumerate(self.sets(requests, q), 1):
            assert chosen.ids.shape == (ROWS, HEADS, CLUSTERS.budget)
            assert not chosen.counts[len(requests) :].any()
            for row, request in enumerate(requests):
                assert present(chosen, row).equal(self.world.alone(request, q[row : row + 1], layer))

    def addresses(self) -> list[int]:
        held = [self.index.table.edges, self.index.table.ends, self.index.placed[1]]
        for tree in (self.index.trees, *(one.tree for one in self.index.layers.values())):
            held += tree.tensors().values()
        return [tensor.data_ptr() for tensor in held]


@pytest.mark.parametrize(("way", "seed", "together"), [(by_host, 0, index_module.TOGETHER), (by_device, 1, 1)])
def test_requests_come_and_go(way: Any, seed: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks and tokens one by one, in slots that others have had; nothing moves in memory.

    Planted at once, or row by row and layer by layer.
    """
    monkeypatch.setattr(index_module, "TOGETHER", together)
    world, numbers = World(seed), random.Random(seed)
    fixed = Fixed(world, way)
    fixed.slots.place([], fixed.rows([]))
    addresses, stood, kept = fixed.addresses(), [world.lengths[request] for request in range(REQUESTS)], 0
    waiting = dict.fromkeys(range(REQUESTS), 0)
    for _ in range(100):
        new = {}
        for request in [*fixed.here]:
            if world.lengths[request] == LENGTH or numbers.random() < 0.05:
                fixed.leave(request)
                waiting[request] = 0
        for request in numbers.sample([*waiting], min(len(waiting), SLOTS - len(fixed.here))):
            del waiting[request]
            fixed.enter(request)
            world.lengths[request] = 0
        for request in fixed.here:
            left = stood[request] - world.lengths[request]
            new[request] = min(left, 50) if left > 0 else 1
            world.lengths[request] += new[request]
        fixed.step(new)
        decoding = [one for one, count in new.items() if count == 1 and world.lengths[one] > CLUSTERS.budget]
        fixed.check(decoding)
        kept += len(decoding)
    assert fixed.addresses() == addresses and kept > 100


def test_nothing_is_seen_of_who_had_the_slot_before() -> None:
    """A long row leaves, and a short one enters: all that it does not write is poisoned, but what says it is none."""
    world = World(2)
    fixed, world.lengths = Fixed(world), [LENGTH, 75, 90, *[0] * 4]
    first = fixed.enter(0)
    fixed.step({0: 1})
    fixed.check([0])
    fixed.leave(0)
    for name, tensor in fixed.index.trees.tensors().items():
        if name not in ("unit_tokens", "edges", "ends"):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)
    second = fixed.enter(1)
    fixed.step({1: 1})
    assert (first.memory.slot, second.memory.slot) == (None, 0)
    fixed.check([1])
    # Also of a row that is in no slot yet.
    fixed.enter(2)
    assert [int(chosen.counts[0, 0]) for chosen in fixed.sets([2], queries(ROWS))] == [90] * 3


@pytest.mark.parametrize("before", [0, 1, 2])
def test_who_decodes_is_indexed_ahead(before: int) -> None:
    """However much of its text came at once, as from the prefix cache, and however many others have some."""
    world = World(5)
    fixed, world.lengths = Fixed(world), [LENGTH - 20] * REQUESTS
    for request in range(3):
        fixed.enter(request)
    for _ in range(before):
        fixed.step(dict.fromkeys(range(3), 1), prompts=range(3))
    # Another may be computing in its first step what it has found.
    assert fixed.index.table.stops[:3] == [(LENGTH - 21) // 12 * 12 * (before == 2)] * 3
    fixed.step(dict.fromkeys(range(3), 1))
    fixed.check([0, 1, 2])


def test_a_prompt_is_indexed_while_it_is_computed() -> None:
    """At the first decoded token nothing is left but what the last chunk has brought."""
    world = World(7)
    fixed = Fixed(world)
    fixed.enter(0)
    for length in (60, 120, 180):
        world.lengths[0] = length
        fixed.step({0: 60})
        assert fixed.index.table.stops[0] == (length - 60) // 12 * 12 * (length > CLUSTERS.budget)
    world.lengths[0] = 181
    fixed.step({0: 1})
    assert fixed.index.table.stops[0] == 180
    fixed.check([0])


def test_planting_is_compiled_before_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what planting runs, on nobody's slot, which stays empty."""
    world, planted, planting = World(8), list[Tensor](), index_module.plant
    fixed = Fixed(world)

    def spied(keys: Tensor, *rest: Any) -> Any:
        planted.append(keys.clone())
        return planting(keys, *rest)

    monkeypatch.setattr(index_module, "plant", spied)
    lengths = [world.lengths[3]]
    for _ in range(2):
        batch = Batch(lengths, [1], [False], [0], [fixed.made(3)], False)
        fixed.slots.warm_up(batch, torch.tensor([[3]]), torch.tensor(lengths, dtype=torch.int32))
    assert len(planted) == 1 and not planted[0].any() and not fixed.index.trees.unit_tokens.any()
    fixed.enter(0)
    fixed.step({0: 1})
    assert len(planted) == 2
    fixed.check([0])


@pytest.mark.parametrize(("buffer", "every"), [(None, 0), (None, 1), (1, 5), (12, 16)])
def test_a_set_of_the_budgets_size_holds_what_is_in_no_chunk(buffer: int | None, every: int) -> None:
    """At the smallest budget, between dense passes, whatever the length: captured searches have no wider sets."""
    sinks, longest = 3, 6
    budget = sinks + (buffer or 1) + every + 2 * longest - 1
    sizes = {"budget": budget, "sinks": sinks, "buffer": buffer, "chunk_max": longest, "every": every}
    selector = ClusterSelector(**sizes, chunk_min=3, replant=7)  # type: ignore[arg-type]
    phase, length, widest = Phase(every or None), budget - 9, 0
    memory = SlotMemory(Slots(plan(selector), None), Clean(phase).at(0))
    memory.wrote(0, length, dense=True)
    for _ in range(200):
        length += 1
        # A pass begins at the first token that a sparse step wrote.
        again = phase.due(length - 1 - memory.final.boundary)
        start = memory.final.boundary if again else length - 1
        memory.wrote(start, length - start, dense=again)
        stop = selector.stop(length, min(length - 1, memory.final.boundary))
        if length > budget and not again:
            assert stop >= sinks + longest
            # The last chunk ends within a longest one of what was looked at.
            widest = max(widest, sinks + length - (stop - longest + 1))
    # A chunk fits beside it, and not much more.
    assert budget - 2 * longest <= widest <= budget - longest
