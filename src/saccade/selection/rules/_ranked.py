"""What rules share that keep a varying number of the best units: ranks and the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import PolicyError
from ...kernels.topk.api import topk
from ...types import sum_dtype


def ranking(scores: Tensor, candidates: Tensor, width: int) -> Tensor:
    """The `width` best of the first `candidates` `[B]` units, best first, ties to the lower position.

    Int32 `[B, G, width]` from float32 scores `[B, G, N]`; -1 where a row has fewer.
    """
    if width == 0:
        return scores.new_empty((*scores.shape[:2], 0), dtype=torch.int32)
    return topk(scores, candidates, width, order="score")[0]


def softmax_parts(scores: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax of `scale * scores` `[B, G, N]` as unnormalised float32 weights and their sum `[B, G]`, in float64."""
    weights = ((scores - scores.amax(dim=-1, keepdim=True)) * scale).exp()
    return weights, weights.sum(dim=-1, dtype=sum_dtype(scores.device))


def need_tokens(rule: str, unit: int) -> None:
    """Refuse units without probabilities.

    Raises:
        PolicyError: for pages.
    """
    if unit != 1:
        raise PolicyError(
            f"rule {rule} needs exact scores of single tokens: a page of {unit} tokens has no probability; use page=1"
        )
