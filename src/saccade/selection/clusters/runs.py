"""Groups of items that are planted together for attention mass: where they lie, the same in every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ...types import Intake
from .token_settings import TokenSettings


@dataclass(frozen=True, slots=True)
class Runs:
    """G neighbouring groups of S places for items in each of n slots.

    Attributes:
        slots, first: int64 `[n]`, the slots, and the place of the first item.
        begin, end: int64 `[n]`, logical positions of the tokens of these items.
        counts, made: int64 `[n, G]`, items and clusters of each group.
        items, clusters, tokens: places for a group's items and clusters, and the most tokens that it has.
    """

    slots: Tensor
    first: Tensor
    begin: Tensor
    end: Tensor
    counts: Tensor
    made: Tensor
    items: int
    clusters: int
    tokens: int

    @property
    def groups(self) -> int:
        return self.counts.shape[1]

    def of_problems(self, numbers: Tensor, layers: int, heads: int) -> Tensor:
        """What is told of each group `[n, G]`, for L layers of H heads: `[L · n · H · G]`."""
        return numbers[:, None].expand(layers, -1, heads, -1).flatten()


def token_runs(
    settings: TokenSettings, new: Sequence[Intake], device: torch.device, together: int
) -> Iterator[tuple[list[int], Runs]]:
    """Blocks of single tokens that are to be planted, alike ones at once, at most so many `together`; and their slots.

    All of it is known on the host.
    """
    blocks = [(size, start, one.slot) for one in new for start, size in settings.changed(one.kept, one.stop)]
    for size, some in groupby(sorted(blocks), lambda block: block[0]):
        alike = [*some]
        step = max(together // size, 1)
        for part in (alike[at : at + step] for at in range(0, len(alike), step)):
            # Sinks are in no cluster.
            counts = [size - min(max(settings.sinks - start, 0), size) for _, start, _ in part]
            told = [
                (slot, start, start + size - count, start + size, count, -(-count // settings.cluster_size))
                for (_, start, slot), count in zip(part, counts, strict=True)
            ]
            columns = torch.tensor(told, dtype=torch.int64, device="cpu").to(device, non_blocking=True).unbind(1)
            slots, first, begin, end, counted, made = columns
            yield (
                [slot for _, _, slot in part],
                Runs(
                    slots, first, begin, end, counted[:, None], made[:, None],
                    items=size, clusters=size // settings.cluster_size, tokens=size,
                ),
            )  # fmt: skip
