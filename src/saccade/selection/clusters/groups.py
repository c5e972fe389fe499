"""Groups of chunks that are planted together: what of them is the same in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...text.table import ChunkTable
from ...types import Intake
from .settings import ClusterSettings


@dataclass(frozen=True, slots=True)
class Groups:
    """G neighbouring groups of S places for chunks in each of n slots.

    Attributes:
        slots: int64 `[n]`, where they are.
        edges: int32 `[n, G · S + 1]`, of their chunks; what is absent lies between equal ones.
        numbers: int64 `[n, G]`, of the groups in their slot.
        chunks, clusters, units: int64 `[n, G]`, how many each group has.
        totals: int64 `[n]`, how many chunks, and how many clusters, the slot has, other groups included.
    """

    slots: Tensor
    edges: Tensor
    numbers: Tensor
    chunks: Tensor
    clusters: Tensor
    units: Tensor
    totals: dict[str, Tensor]

    @classmethod
    def of(cls, settings: ClusterSettings, slots: Tensor, first: Tensor, edges: Tensor, counts: Tensor) -> Groups:
        """Of each slot from its `first` on, int64 `[n]`, as many as have `edges`; `counts` `[n]` are all its chunks."""
        size, per_cluster = settings.replant, settings.cluster_size
        numbers = first[:, None] + torch.arange((edges.shape[1] - 1) // size, device=edges.device)
        chunks = (counts[:, None] - numbers * size).clamp(0, size)
        clusters = (chunks + per_cluster - 1) // per_cluster
        # Looked up: a square root would have to be rounded as the host rounds it.
        units = torch.tensor([settings.units(number) for number in range(settings.clusters + 1)], device="cpu")
        return cls(
            slots=slots,
            edges=edges,
            numbers=numbers,
            chunks=chunks,
            clusters=clusters,
            units=units.to(edges.device, non_blocking=True)[clusters],
            totals={
                "chunks": counts,
                "clusters": counts // size * settings.clusters + -(-(counts % size) // per_cluster),
            },
        )


def touched(
    settings: ClusterSettings, table: ChunkTable, new: Sequence[Intake], held: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `Groups.of` is told of those with new chunks, of as many as there is room for; the table has taken them in.

    Of each slot: which it is, its first such group, the edges int32 `[n, G · S + 1]` from there on, all its chunks.
    """
    size = settings.replant
    told = torch.tensor([(one.slot, one.kept) for one in new], device="cpu")
    slots, kept = told.to(table.edges.device, non_blocking=True).unbind(1)
    first, counts = table.counted(slots, kept) // size, table.counts.index_select(0, slots).long()
    number = max(map(settings.touched, new))
    if slots.is_cpu:
        # Reading them costs nothing here, and groups of nothing would be looked at else.
        number = max(int(((counts - 1).clamp(min=0) // size - first).max()) + 1, 1)
    number = min(number, held)
    # Beginning earlier makes the same once more.
    first = first.clamp(max=held - number)
    chunk = first[:, None] * size + torch.arange(number * size + 1, device=slots.device)
    return slots, first, table.edges.index_select(0, slots).gather(1, torch.minimum(chunk, counts[:, None])), counts
