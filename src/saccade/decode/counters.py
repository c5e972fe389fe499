"""What a run counts: tokens attended per layer and step, kept on the device until somebody asks."""

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
        ordered = sorted(usages, key=_alike)
        counted = _joined([_totals(list(some)) for _, some in groupby(ordered, key=lambda one: id(one.rows))])
        if not self._by_row:
            counted = counted / counted[:, 3:].clamp(min=1)
        with COUNTING:
            if device not in self._sums:
                self._sums[device] = torch.zeros((self.layers, 4), dtype=sum_dtype(device), device=device)
            sums = self._sums[device]
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
    """Equal for usages of the same rows whose sets have one shape: all tokens are one set of as many."""
    noted = (usage.overflowed is not None) + 2 * (usage.last is not None)
    return id(usage.rows), noted, 1 if usage.counts is None else usage.counts.shape[1], usage.unit


def _totals(usages: list[Usage]) -> Tensor:
    """Of n usages of the same rows, sums over these: float32 `[n, 4]`, tokens, shares, overflows and rows."""
    rows = usages[0].rows
    alike = [list(some) for _, some in groupby(usages, key=_alike)]
    parts = [_tokens(some) for some in alike]
    tokens = _joined(parts)
    flags = [[one.overflowed for one in some if one.overflowed is not None] for some in alike]
    overflow = torch.zeros_like(tokens)
    if any(flags):
        told = zip(flags, parts, strict=True)
        overflow = _joined([_means(some) if some else torch.zeros_like(part) for some, part in told])
    counted = rows.seq_lens > 0
    if rows.whole is not None:
        counted = counted > rows.whole
    each = torch.stack((tokens, tokens / rows.seq_lens, overflow, torch.ones_like(tokens)), dim=-1)
    return torch.where(counted[:, None], each, 0).sum(1)


def _tokens(usages: list[Usage]) -> Tensor:
    """What usages that are alike attended to in each row, float32 `[n, B]`; a mean over their sets."""
    lengths, unit = usages[0].rows.seq_lens, usages[0].unit
    tokens = _means([lengths[:, None] if one.counts is None else one.counts for one in usages])
    if unit == 1:
        return tokens
    # Only the page of the current token can be partial: by so much less than none.
    missing, partial = lengths.remainder(-unit), [one.last for one in usages if one.last is not None]
    return tokens * unit + (missing * _means(partial) if partial else missing)


def _means(sets: Sequence[Tensor]) -> Tensor:
    """Over the sets of each row, `[B, G]` each."""
    if sets[0].shape[1] == 1:
        return torch.stack([one[:, 0] for one in sets]).float()
    return torch.stack(list(sets)).float().mean(-1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
