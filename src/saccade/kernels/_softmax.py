"""What a softmax makes of scores, for whoever has all of them at hand."""

import torch
from torch import Tensor


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """`cap · tanh(logits / cap)`; -inf, where there is no token, stays. None: the logits themselves."""
    if cap is None:
        return logits
    return torch.where(logits == -torch.inf, logits, cap * torch.tanh(logits / cap))


def weights_of(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of logits `[B, H, g, N]`, scaled and capped; sinks `[H · g]` have the rest, if there are any."""
    weights = torch.softmax(logits, dim=-1)
    if sinks is None:
        return weights
    # What tokens keep: Σ exp(logits) / (Σ exp(logits) + exp(sinks)).
    return (
        weights * torch.sigmoid(torch.logsumexp(logits, dim=-1) - sinks.float().view(1, *logits.shape[1:3]))[..., None]
    )
