"""What rules share that keep a varying number of the best units: ranks, a cut per list, and the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import PolicyError
from ..kernels.topk.api import topk

_LAST = torch.iinfo(torch.int32).max


def ranking(scores: Tensor, candidates: Tensor, width: int) -> Tensor:
    """The `width` best of the first `candidates` `[B]` units, best first, ties to the lower position.

    Int32 `[B, G, width]` from float32 scores `[B, G, N]`; -1 where a row has fewer.
    """
    if width == 0:
        return scores.new_empty((*scores.shape[:2], 0), dtype=torch.int32)
    return topk(scores, candidates, width, order="score")[0]


def best_and_last(ranked: Tensor, take: Tensor, first: Tensor, last: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The sets of the first `take` `[B, G]` of each ranking `[B, G, R]` and of the units that end a row.

    Those are `first .. first + last` (int32 `[B]` each, `last` at most `width`), behind all that is ranked.

    Returns:
        ids int32 `[B, G, R + width]` ascending, -1 after the count; counts int32 `[B, G]`.
    """
    slot = torch.arange(ranked.shape[-1] + width, dtype=torch.int32, device=ranked.device)
    taken = ranked.masked_fill(slot[: ranked.shape[-1]] >= take[..., None], _LAST).sort(dim=-1).values
    taken = torch.nn.functional.pad(taken, (0, width))
    behind = slot - take[..., None]
    ids = torch.where(behind < 0, taken, first[:, None, None] + behind)
    counts = take + last[:, None]
    return torch.where(slot < counts[..., None], ids, -1), counts


def softmax_parts(scores: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax of `scale * scores` `[B, G, N]` as unnormalised float32 weights and their sum `[B, G]`, in float64."""
    weights = ((scores - scores.amax(dim=-1, keepdim=True)) * scale).exp()
    return weights, weights.sum(dim=-1, dtype=sum_dtype(scores.device))


def sum_dtype(device: torch.device) -> torch.dtype:
    """In which sums of probabilities are taken; Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def need_tokens(rule: str, unit: int) -> None:
    """Refuse units without probabilities.

    Raises:
        PolicyError: for pages.
    """
    if unit != 1:
        raise PolicyError(
            f"rule {rule} needs exact scores of single tokens: a page of {unit} tokens has no probability; use page=1"
        )
