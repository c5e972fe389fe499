"""What a run counts: tokens attended per layer and step, kept on the device until somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..types import Rows, sum_dtype

COUNTING = threading.RLock()
"""Held while a thread adds to what others add to. One for all runs: a lock of their own could not be copied."""


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """What some heads of a layer attended to for one token of every row.

    Attributes:
        layer: of the model.
        weight: share of the layer's heads.
        rows: of the batch; those of length 0 and those that are `whole` count nothing.
        counts: int32 `[B, G]`, units in the heads' sets; None: all tokens.
        unit: tokens of a unit.
        overflowed: bool `[B, G]`, as of a `Selection`.
        last: bool `[B, G]`, whether a set holds the current token's unit; None: all do.
    """

    layer: int
    weight: float
    rows: Rows
    counts: Tensor | None = None
    unit: int = 1
    overflowed: Tensor | None = None
    last: Tensor | None = None


class Counters:
    """Sums over decode steps, per layer: tokens attended, share of the row attended, sets that overflowed, and steps.

    Nothing of them is kept on the host, so that a CUDA graph counts as its capture did. Any thread may count; while
    one counts `undone`, the others wait.

    Args:
        layers: of the model.
        by_row: count every row of a batch as a step, as where batches change; else a batch is one step of its mean row.
    """

    def __init__(self, layers: int, *, by_row: bool = False) -> None:
        self._by_row = by_row
        self._sums: dict[torch.device, Tensor] = {}
        self.layers = layers
        self._weights: dict[tuple[torch.device, tuple[tuple[int, float], ...]], Tensor] = {}

    def add(self, usages: Sequence[Usage]) -> None:
        """Count what a step's layers attended to, all at once: in a CUDA graph every launch costs its time."""
        if not usages:
            return
        device = usages[0].rows.seq_lens.device
        # Sets of one shape are counted together.
        ordered = sorted(usages, key=_alike)
        counted = torch.cat([_totals(list(some)) for _, some in groupby(ordered, key=_alike)])
        if not self._by_row:
            counted = counted / counted[:, 3:].clamp(min=1)
        with COUNTING:
            sums = self._sum(device)
            sums.addmm_(self._weighting(device, ordered), counted.to(sums.dtype))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Count nothing of what happens inside; sums keep their place in memory, where a CUDA graph may add to them."""
        with COUNTING:
            before = {device: sums.clone() for device, sums in self._sums.items()}
            try:
                yield
            finally:
                for device, sums in self._sums.items():
                    sums.copy_(before[device]) if device in before else sums.zero_()

    def totals(self) -> list[tuple[float, float, float, float]]:
        """Per layer, the sums of tokens, shares, overflows and steps; reads the device."""
        with COUNTING:
            if not self._sums:
                return [(0.0, 0.0, 0.0, 0.0)] * self.layers
            for device in self._sums:
                if device.type == "cuda":
                    # Steps may run on other streams than that of the thread that asks.
                    torch.cuda.synchronize(device)
            summed = torch.stack([sums.cpu() for sums in self._sums.values()]).sum(0)
        return [(tokens, share, overflow, steps) for tokens, share, overflow, steps in summed.tolist()]

    def _sum(self, device: torch.device) -> Tensor:
        sums = self._sums.get(device)
        if sums is None:
            sums = self._sums[device] = torch.zeros((self.layers, 4), dtype=sum_dtype(device), device=device)
        return sums

    def _weighting(self, device: torch.device, usages: Sequence[Usage]) -> Tensor:
        """`[layers, usages]`: which layer each of them counts for, and how much."""
        key = device, tuple((one.layer, one.weight) for one in usages)
        weights = self._weights.get(key)
        if weights is None:
            weights = torch.zeros((self.layers, len(usages)), dtype=sum_dtype(device), device=device)
            for column, one in enumerate(usages):
                # Number by number: a tensor of host numbers would make the host wait.
                weights[one.layer, column].fill_(one.weight)
            self._weights[key] = weights
        return weights


def _alike(usage: Usage) -> tuple[int, ...]:
    """Equal for usages of the same rows whose sets have one shape."""
    if usage.counts is None:
        return id(usage.rows), 0
    noted = 1 + (usage.overflowed is not None) + 2 * (usage.last is not None)
    return id(usage.rows), noted, usage.counts.shape[1], usage.unit


def _totals(usages: list[Usage]) -> Tensor:
    """Of usages that are alike, sums over the rows: float32 `[n, 4]`, tokens, shares, overflows and rows."""
    rows, unit = usages[0].rows, usages[0].unit
    lengths = rows.seq_lens
    counted = lengths > 0 if rows.whole is None else (lengths > 0) & ~rows.whole
    sizes = lengths.float()
    counts = [usage.counts for usage in usages if usage.counts is not None]
    overflows = [usage.overflowed for usage in usages if usage.overflowed is not None]
    tokens = torch.stack(counts).float().mean(-1) if counts else sizes[None]
    if unit > 1:
        # Only the page of the current token can be partial.
        partial = [usage.last for usage in usages if usage.last is not None]
        missing = (-lengths).remainder(unit)
        tokens = tokens * unit - (missing * torch.stack(partial).float().mean(-1) if partial else missing)
    overflow = torch.stack(overflows).float().mean(-1) if overflows else torch.zeros_like(tokens)
    each = torch.stack((tokens, tokens / sizes.clamp(min=1), overflow, torch.ones_like(tokens)), dim=-1)
    return torch.where(counted[:, None], each, 0).sum(1).expand(len(usages), -1)
