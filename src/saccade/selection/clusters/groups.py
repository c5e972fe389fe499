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
    """G neighbouring groups of S places for chunks in each of n rows, for H heads: P = n · H · G problems.

    Attributes:
        slots, first: int64 `[n]`, a row of the tree and the first of its groups.
        places: the same on the host, where that costs nothing.
        edges: int32 `[n, G · S + 1]`, of their chunks; what is absent lies between equal ones.
        lengths: int64 `[P, S]`, tokens of each chunk.
        chunks, clusters, units: int64 `[P]`, how many each group has.
        before: int64 `[P, 1]`, how many chunks, and how many clusters, of the row lie before each group.
        totals: int64 `[n, 1, 1]`, how many of both the row has, other groups included.
        latest: int64 `[P, 1]`, the row's last chunk; 0 without any.
    """

    slots: Tensor
    first: Tensor
    places: list[tuple[int, int]] | None
    edges: Tensor
    lengths: Tensor
    chunks: Tensor
    clusters: Tensor
    units: Tensor
    before: dict[str, Tensor]
    totals: dict[str, Tensor]
    latest: Tensor

    @classmethod
    def of(
        cls, settings: ClusterSettings, slots: Tensor, first: Tensor, edges: Tensor, counts: Tensor, heads: int
    ) -> Groups:
        """As told by `slots`, `first` and `edges`; `counts`, int64 `[n]`, are all chunks of the rows."""
        size, clusters = settings.replant, settings.clusters
        group = first[:, None] + torch.arange((edges.shape[1] - 1) // size, device=edges.device)
        chunks = (counts[:, None] - group * size).clamp(0, size)
        present = (chunks + settings.cluster_size - 1) // settings.cluster_size
        # Looked up: a square root would have to be rounded as the host rounds it.
        units = _units_of(settings).to(edges.device, non_blocking=True)[present]
        whole, rest = counts // size, counts % size
        totals = {"chunks": counts, "clusters": whole * clusters + -(-rest // settings.cluster_size)}
        latest = (counts - 1).clamp(min=0)[:, None].expand_as(group)

        def of_heads(numbers: Tensor) -> Tensor:
            """`[n, G, ...]` for every head, `[P, ...]`."""
            return numbers[:, None].expand(-1, heads, *numbers.shape[1:]).flatten(0, 2)

        return cls(
            slots=slots,
            first=first,
            places=list(zip(slots.tolist(), first.tolist(), strict=True)) if slots.is_cpu else None,
            edges=edges,
            lengths=of_heads(edges.long().diff(dim=1).unflatten(1, (-1, size))),
            chunks=of_heads(chunks),
            clusters=of_heads(present),
            units=of_heads(units),
            before={name: of_heads(group)[:, None] * of for name, of in (("chunks", size), ("clusters", clusters))},
            totals={name: total[:, None, None] for name, total in totals.items()},
            latest=of_heads(latest)[:, None],
        )

    @classmethod
    def touched(
        cls, settings: ClusterSettings, table: ChunkTable, new: Sequence[Intake], held: int, heads: int, layers: int
    ) -> Groups:
        """Those with chunks that are new, in a tree with room for `held` groups of a row; the table has taken them in.

        `layers`: the tree has the table's rows so many times, one layer after the other, and to all the same is new.
        """
        size, told = settings.replant, [(one.slot, one.kept) for one in new]
        slots, kept = torch.tensor(told, device="cpu").to(table.edges.device, non_blocking=True).unbind(1)
        first, counts = table.counted(slots, kept) // size, table.counts.index_select(0, slots).long()
        number = settings.touched(new)
        if slots.is_cpu:
            # Reading them costs nothing here, and groups of nothing would be planted else.
            number = max(int(((counts - 1).clamp(min=0) // size - first).max()) + 1, 1)
        number = min(number, held)
        # Beginning earlier plants the same once more.
        first = first.clamp(max=held - number)
        chunk = first[:, None] * size + torch.arange(number * size + 1, device=slots.device)
        edges = table.edges.index_select(0, slots).gather(1, torch.minimum(chunk, counts[:, None]))
        if layers > 1:
            above = torch.arange(layers, device=slots.device) * len(table.stops)
            slots = (above[:, None] + slots).flatten()
            first, counts, edges = first.repeat(layers), counts.repeat(layers), edges.repeat(layers, 1)
        return cls.of(settings, slots, first, edges, counts, heads)


def _units_of(settings: ClusterSettings) -> Tensor:
    """Units over 0 to all clusters of a group."""
    return torch.tensor([settings.units(number) for number in range(settings.clusters + 1)], device="cpu")
