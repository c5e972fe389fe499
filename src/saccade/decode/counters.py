"""What a run counts: tokens attended per layer and step, kept on the device until somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..types import sum_dtype

COUNTING = threading.RLock()
"""Held while a thread adds to what others add to. One for all runs: a lock of their own could not be copied."""


class Counters:
    """Sums over decode steps, per layer: steps, tokens attended, share of the row attended, sets that overflowed.

    Any thread may count; while one counts `together` or `undone`, the others wait.

    Args:
        layers: of the model.
        by_row: count every row of a batch as a step, as where batches change; else a batch is one step of its mean row.
    """

    def __init__(self, layers: int, *, by_row: bool = False) -> None:
        self._by_row = by_row
        self.steps = [0.0] * layers
        self._sums: dict[torch.device, Tensor] = {}
        self._layers = layers
        self._waiting: list[_Usage] | None = None
        self._weights: dict[tuple[torch.device, tuple[tuple[int, float], ...]], Tensor] = {}

    def add(self, layer: int, usage: Tensor, weight: float, rows: int = 1) -> None:
        """Count a span of heads that is `weight` of the layer.

        Args:
            layer: of the model.
            usage: float32 `[3]`, means over the batch: tokens, share, overflow. Not to be written any more.
            weight: share of the layer's heads.
            rows: of the batch.
        """
        weight = weight * rows if self._by_row else weight
        with COUNTING:
            self.steps[layer] += weight
            if self._waiting is None:
                self._sum(usage.device)[layer].add_(usage, alpha=weight)
            else:
                self._waiting.append(_Usage(layer, weight, usage))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Add what is counted inside at its end, all layers at once: in a CUDA graph every launch costs its time."""
        waiting: list[_Usage] = []
        with COUNTING:
            self._waiting = waiting
            try:
                yield
            finally:
                self._waiting = None
                for device in {one.usage.device for one in waiting}:
                    self._add_all(device, [one for one in waiting if one.usage.device == device])

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Count nothing of what happens inside; sums keep their place in memory, where a CUDA graph may add to them."""
        with COUNTING:
            steps, before = list(self.steps), {device: sums.clone() for device, sums in self._sums.items()}
            try:
                yield
            finally:
                self.steps[:] = steps
                for device, sums in self._sums.items():
                    sums.copy_(before[device]) if device in before else sums.zero_()

    def replayed(self, steps: Sequence[float]) -> None:
        """Count the steps per layer of a CUDA graph that runs again; the sums it adds to itself, on the device."""
        with COUNTING:
            self.steps[:] = [before + more for before, more in zip(self.steps, steps, strict=True)]

    def totals(self) -> list[tuple[float, float, float]]:
        """Per layer, the sums of tokens, shares and overflows; reads the device."""
        with COUNTING:
            if not self._sums:
                return [(0.0, 0.0, 0.0)] * self._layers
            summed = torch.stack([sums.cpu() for sums in self._sums.values()]).sum(0)
        return [(tokens, share, overflow) for tokens, share, overflow in summed.tolist()]

    def _sum(self, device: torch.device) -> Tensor:
        sums = self._sums.get(device)
        if sums is None:
            sums = self._sums[device] = torch.zeros((self._layers, 3), dtype=sum_dtype(device), device=device)
        return sums

    def _add_all(self, device: torch.device, usages: list[_Usage]) -> None:
        sums, key = self._sum(device), (device, tuple((one.layer, one.weight) for one in usages))
        weights = self._weights.get(key)
        if weights is None:
            weights = self._weights[key] = torch.zeros((self._layers, len(usages)), dtype=sums.dtype, device=device)
            for column, one in enumerate(usages):
                # Number by number: a tensor of host numbers would make the host wait.
                weights[one.layer, column].fill_(one.weight)
        sums.addmm_(weights, torch.stack([one.usage for one in usages]).to(sums.dtype))


class _Usage(NamedTuple):
    layer: int
    weight: float
    usage: Tensor
