"""Attention sinks as parameters, for whoever has all scores at hand."""

from __future__ import annotations

import torch
from torch import Tensor


def beside_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """What tokens keep of the weights: `Σ exp(scores) / (Σ exp(scores) + exp(sinks))`, `[B, H, g, 1]`.

    Args:
        scores: scaled, `[B, H, g, N]`, -inf where there is no token.
        sinks: `[H · g]`.
    """
    logits = sinks.float().view(1, *scores.shape[1:3])
    return torch.sigmoid(torch.logsumexp(scores, dim=-1) - logits)[..., None]
