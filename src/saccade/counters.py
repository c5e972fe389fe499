"""What a run counts: tokens attended per layer and step, kept on the device until somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor


class Counters:
    """Sums over decode steps, per layer: steps, tokens attended, share of the row attended, sets that overflowed.

    Args:
        layers: of the model.
        by_row: count every row of a batch as a step, as where batches change; else a batch is one step of its mean row.
    """

    def __init__(self, layers: int, *, by_row: bool = False) -> None:
        self._by_row = by_row
        self.steps = [0.0] * layers
        self._sums: dict[torch.device, Tensor] = {}
        self._layers = layers

    def add(self, layer: int, usage: Tensor, weight: float, rows: int = 1) -> None:
        """Count a span of heads that is `weight` of the layer.

        Args:
            layer: of the model.
            usage: float32 `[3]`, means over the batch: tokens, share, overflow.
            weight: share of the layer's heads.
            rows: of the batch.
        """
        weight = weight * rows if self._by_row else weight
        sums = self._sums.get(usage.device)
        if sums is None:
            sums = self._sums[usage.device] = torch.zeros(
                (self._layers, 3), dtype=_sum_dtype(usage.device), device=usage.device
            )
        sums[layer].add_(usage, alpha=weight)
        self.steps[layer] += weight

    def totals(self) -> list[tuple[float, float, float]]:
        """Per layer, the sums of tokens, shares and overflows; reads the device."""
        if not self._sums:
            return [(0.0, 0.0, 0.0)] * self._layers
        summed = torch.stack([sums.cpu() for sums in self._sums.values()]).sum(0)
        return [(tokens, share, overflow) for tokens, share, overflow in summed.tolist()]


def _sum_dtype(device: torch.device) -> torch.dtype:
    # Apple's GPUs have no float64.
    return torch.float32 if device.type == "mps" else torch.float64
