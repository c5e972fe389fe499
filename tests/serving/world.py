"""Requests whose tokens and keys are known, and what an index of each of them alone would choose."""

import random
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from saccade.adapters.vllm.worker.batch import Batch
from saccade.adapters.vllm.worker.fed import RequestFeed
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.slots import RequestSlots
from saccade.decode.state import own_indexes
from saccade.plans.plan import Plan, layer_roles
from saccade.plans.rectify import ALL, Phase
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.index import SlotIndex
from saccade.text.history import TokenHistory
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

    def slots(self, selector: Any, text: RequestFeed, index: SlotIndex | None = None, **sizes: int) -> RequestSlots:
        return RequestSlots(self.plan(selector), Phase(None), text, self.view, index, **sizes)

    def step(
        self, slots: RequestSlots, here: dict[int, RequestRow], new: dict[int, int], prompts: Collection[int] = ()
    ) -> None:
        """A step that computes so many of the last tokens of these requests; lengths are those behind it.

        More than one are a prompt's, and also one of those of `prompts`. Its rows are placed in their slots.
        """
        counts, lengths = [*new.values()], [self.lengths[request] for request in new]
        prefilling = [count > 1 or request in prompts for request, count in new.items()]
        requests = [here[request] for request in new]
        table, on_device = torch.tensor([*new], dtype=torch.int32)[:, None], torch.tensor(lengths, dtype=torch.int32)
        slots.follow(Batch(lengths, counts, prefilling, [*new], requests, True), table, on_device)

    def alone(self, selector: Any, request: int, q: Tensor, layer: int = 1) -> Tensor:
        """The set of a request that was all there at once."""
        kv = self.view(layer, self.rows([request]))
        history = TokenHistory(LEVELS)
        history.record(0, LENGTH, 1, self.ids[request : request + 1], None)
        indexes = own_indexes(self.plan(selector), history)
        indexes.begin(0, ALL)
        return present(selector.select(q, kv, indexes.of(layer, kv), None, 1.0), 0)


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
