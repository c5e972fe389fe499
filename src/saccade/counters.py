"""What a run counts: tokens attended per layer and step, kept on the device until somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor


class Counters:
    """Sums over decode steps, per layer: steps, tokens attended, share of the row attended, sets that overflowed."""

    def __init__(self, layers: int) -> None:
        self.steps = [0.0] * layers
        self._sums: dict[torch.device, Tensor] = {}
        self._layers = layers

    def add(self, layer: int, usage: Tensor, weight: float) -> None:
        """Count a span of heads that is `weight` of the layer; `usage` is float32 `[3]`: tokens, share, overflow."""
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
