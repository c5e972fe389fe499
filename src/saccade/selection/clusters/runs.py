"""Groups of items that are planted together for attention mass: where they lie, the same in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ...text.table import ChunkTable
from ...types import Intake
from .settings import ClusterSettings
from .token_settings import TokenSettings


@dataclass(frozen=True, slots=True)
class Runs:
    """n groups of as many places for items.

    Attributes:
        on_host: the slot of each.
        slots, first, clusters: int64 `[n]`, the slots, and the places of the first item and of the first cluster.
        begin, end: int64 `[n]`, logical positions of the items' tokens.
        counts, made: int64 `[n]`, items and clusters of each.
        owners: int64 `[n, W]`, the chunk of each of W tokens, where items are chunks; the number of places of none.
    """

    on_host: Sequence[int]
    slots: Tensor
    first: Tensor
    clusters: Tensor
    begin: Tensor
    end: Tensor
    counts: Tensor
    made: Tensor
    owners: Tensor | None = None

    def part(self, start: int, stop: int) -> Runs:
        """Some of them."""
        some = slice(start, stop)
        slots, first, clusters, begin, end, counts, made = (
            one[some]
            for one in (self.slots, self.first, self.clusters, self.begin, self.end, self.counts, self.made)
        )
        owners = None if self.owners is None else self.owners[some]
        return Runs(self.on_host[some], slots, first, clusters, begin, end, counts, made, owners)


def token_runs(settings: TokenSettings, new: Sequence[Intake], device: torch.device) -> Iterator[tuple[int, Runs]]:
    """Tokens of a block, and all blocks of so many that are to be planted; all of it is known on the host."""
    blocks = [(size, start, one.slot) for one in new for start, size in settings.changed(one.kept, one.stop)]
    for size, some in groupby(sorted(blocks), lambda block: block[0]):
        told = []
        for _, start, slot in some:
            # Sinks are in no cluster.
            count = size - min(max(settings.sinks - start, 0), size)
            place, made = start // settings.cluster_size, -(-count // settings.cluster_size)
            told.append((slot, start, place, start + size - count, start + size, count, made))
        columns = torch.tensor(told, dtype=torch.int64, device="cpu").to(device, non_blocking=True).unbind(1)
        yield size, Runs([row[0] for row in told], *columns)


def chunk_runs(settings: ClusterSettings, table: ChunkTable, new: Sequence[Intake], held: int) -> Runs:
    """Groups with chunks that are new, of as many as there is room for; the table has taken them in."""
    size, device = settings.replant, table.edges.device
    told = [(one.slot, one.kept) for one in new]
    slots, kept = torch.tensor(told, device="cpu").to(device, non_blocking=True).unbind(1)
    first, counts = table.counted(slots, kept) // size, table.counts.index_select(0, slots).long()
    number = max(map(settings.touched, new))
    if slots.is_cpu:
        # Reading them costs nothing here, and groups of nothing would be planted else.
        number = max(int(((counts - 1).clamp(min=0) // size - first).max()) + 1, 1)
    number = min(number, held)
    # Beginning earlier plants the same once more.
    numbers = (first.clamp(max=held - number)[:, None] + torch.arange(number, device=device)).flatten()
    slots, counts = slots.repeat_interleave(number), counts.repeat_interleave(number)
    chunk = torch.minimum(numbers[:, None] * size + torch.arange(size + 1, device=device), counts[:, None])
    edges = table.edges.index_select(0, slots).gather(1, chunk).long()
    begin, end = edges[:, 0].contiguous(), edges[:, -1].contiguous()
    position = begin[:, None] + torch.arange(size * settings.chunk_max, device=device)
    owners = torch.searchsorted(edges[:, 1:].contiguous(), position, right=True)
    counts = (counts - numbers * size).clamp(0, size)
    return Runs(
        [one.slot for one in new for _ in range(number)], slots, numbers * size, numbers * settings.clusters, begin,
        end, counts, -(-counts // settings.cluster_size), owners.where(position < end[:, None], size),
    )  # fmt: skip
