"""Groups of tokens whose sets are made together: where they lie, the same in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...text.table import ChunkTable
from ...types import Intake
from .groups import touched
from .settings import ClusterSettings
from .token_settings import TokenSettings


class Runs(NamedTuple):
    """n groups.

    Attributes:
        on_host: the slot of each.
        slots, place: int64 `[n]`, the slots, and the place of the first set.
        start, begin, end: int64 `[n]`, where the group starts, and logical positions of its tokens: sinks are none.
        made: int64 `[n]`, sets of each.
        owners: int64 `[n, W]`, the chunk of each of W tokens, where sets are chunks; the number of places of none.
    """

    on_host: Sequence[int]
    slots: Tensor
    place: Tensor
    start: Tensor
    begin: Tensor
    end: Tensor
    made: Tensor
    owners: Tensor | None = None

    def part(self, first: int, stop: int) -> Runs:
        """Some of them."""
        parts: list[Any] = [None if held is None else held[first:stop] for held in self]
        return Runs(*parts)


def token_runs(settings: TokenSettings, new: Sequence[Intake], device: torch.device) -> Iterator[tuple[int, Runs]]:
    """Tokens of a block, and all blocks of so many that are to be planted; all of it is known on the host."""
    blocks = [(size, start, one.slot, 0) for one in new for start, size in settings.changed(one.kept, one.stop)]
    # Nothing is planted in an empty slot, so that what planting runs is compiled.
    blocks += [(settings.capacity, 0, one.slot, settings.capacity) for one in new if one.stop == 0]
    for size, some in groupby(sorted(blocks), lambda block: block[0]):
        told = []
        for _, start, slot, skipped in some:
            begin = min(max(settings.sinks, start + skipped), start + size)
            made = -(-(start + size - begin) // settings.cluster_size)
            told.append((slot, start // settings.cluster_size, start, begin, start + size, made))
        columns = torch.tensor(told, dtype=torch.int64, device="cpu").to(device, non_blocking=True).unbind(1)
        yield size, Runs([row[0] for row in told], *columns)


def chunk_runs(settings: ClusterSettings, table: ChunkTable, new: Sequence[Intake], held: int) -> Runs:
    """Groups with chunks that are new, of as many as there is room for; the table has taken them in."""
    size, device = settings.replant, table.edges.device
    slots, first, edges, counts = touched(settings, table, new, held)
    number = (edges.shape[1] - 1) // size
    numbers = (first[:, None] + torch.arange(number, device=device)).flatten()
    slots, counts = slots.repeat_interleave(number), counts.repeat_interleave(number)
    edges = edges.long().unfold(1, size + 1, size).flatten(0, 1)
    begin, end = edges[:, 0].contiguous(), edges[:, -1].contiguous()
    position = begin[:, None] + torch.arange(settings.tokens, device=device)
    owners = torch.searchsorted(edges[:, 1:].contiguous(), position, right=True).where(position < end[:, None], size)
    on_host = [one.slot for one in new for _ in range(number)]
    return Runs(on_host, slots, numbers * size, begin, begin, end, counts, owners)
