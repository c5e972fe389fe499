"""The inputs of a forward call, moved to other slots: earlier ones put in front of it, or the ones that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModelError


def refuse_unmovable(kwargs: dict[str, Any], ids: Tensor | None) -> None:
    """Raise unless a decoding call is made of token ids and of inputs that can be computed for other slots.

    Raises:
        UnsupportedModelError: for embeddings and per-token inputs, of which only the caller knows the others.
    """
    if ids is None:
        raise UnsupportedModelError("rectification runs decoded tokens again, so it needs input_ids, not inputs_embeds")
    if kwargs.get("token_type_ids") is not None:
        raise UnsupportedModelError("rectification cannot run decoded tokens again: token_type_ids are the caller's")


def placed(kwargs: dict[str, Any], past: int, start: int, ids: Tensor, positions: Tensor | None) -> dict[str, Any]:
    """The inputs of a decoding call at `past` filled slots, changed to feed `ids` `[B, n]` from slot `start` on.

    Args:
        kwargs: of the call as it came.
        past: slots that were filled when it came.
        start: slot of the first fed token.
        ids: token ids int64 `[B, n]`.
        positions: their position ids `[B, n]`; None where the model counts for itself.
    """
    stop = start + ids.shape[1]
    moved = {**kwargs, "input_ids": ids, "inputs_embeds": None, "attention_mask": None}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        moved["attention_mask"] = {kind: _mask(part, past, start, stop) for kind, part in mask.items()}
    else:
        moved["attention_mask"] = _mask(mask, past, start, stop)
    if kwargs.get("position_ids") is not None:
        if positions is None:
            raise UnsupportedModelError("position_ids came with this call but not with those that it runs again")
        moved["position_ids"] = positions
    if kwargs.get("cache_position") is not None:
        moved["cache_position"] = torch.arange(start, stop, device=ids.device)
    return moved


def same_view(mask: Any, earlier: Any, slots: int) -> bool:
    """Whether two calls' masks hide the same of the first `slots` slots."""
    if mask is None or earlier is None:
        return mask is earlier
    if isinstance(mask, dict) or isinstance(earlier, dict):
        return (
            isinstance(mask, dict)
            and isinstance(earlier, dict)
            and all(same_view(part, earlier.get(kind), slots) for kind, part in mask.items())
        )
    if mask.dim() != earlier.dim():
        return False
    seen, before = (part[..., :slots] if part.dim() == 2 else part[:, :, -1, :slots] for part in (mask, earlier))
    return seen.shape == before.shape and torch.equal(seen, before)


def _mask(mask: Tensor | None, past: int, start: int, stop: int) -> Tensor | None:
    """A causal mask for the queries at slots `start..stop`, from that of a call at `past` filled slots."""
    if mask is None:
        return None
    if mask.dim() == 2:
        missing = stop - mask.shape[1]
        return torch.nn.functional.pad(mask, (0, missing), value=1) if missing > 0 else mask[:, :stop]
    hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
    shown = 0.0 if mask.is_floating_point() else True
    first = mask[:, :, :1]
    if stop > mask.shape[-1]:
        first = torch.nn.functional.pad(first, (0, stop - mask.shape[-1]), value=shown)
    slots = torch.arange(first.shape[-1], device=mask.device)
    own = torch.arange(start, stop, device=mask.device)[:, None]
    # Only padding is hidden besides what lies ahead, and padding lies to the left of every query.
    behind = torch.where(slots > past, torch.full_like(first, shown), first)
    return torch.where(slots <= own, behind, torch.full_like(first, hidden))
