"""Overwriting: when it is their turn, unclean tokens are run again, densely, in front of the call at hand."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...decode.stats import Rectifications
from ...errors import UnsupportedModelError
from ...plans.rectify import Phase
from . import cache
from .call import Call
from .session import Session


@dataclass(frozen=True, slots=True)
class Rectifier:
    """Decides by `phase` whose turn it is, puts earlier tokens in front of a call and takes their states off again.

    Passes are counted in `done`.
    """

    phase: Phase
    done: Rectifications

    def begin(
        self, session: Session, held: Any, call: Call, ids: Tensor | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Start a call on the cache `held` that comes with `ids` `[B, queries]`; the inputs that it is to run on, or an
        UnsupportedModelError if it decodes and they cannot be computed for other slots."""
        if call.prompt < call.queries:
            refuse_unmovable(kwargs, ids)
        unclean, past, stop = session.unclean(call.past), call.past, call.past + call.queries
        # A prompt is dense anyway, so it takes along what is unclean.
        takes_along = unclean > 0 and call.prompt > 0
        if not takes_along and not self.phase.due(unclean, call.queries - call.prompt):
            session.begin(call)
            return kwargs
        if unclean == 0 or not session.state.needs_selection(past):
            # Nothing to run again: a call of many tokens, or tokens that were dense because the budget covers them.
            session.begin(Call(past, call.queries, call.queries), covered=True)
            return kwargs
        refuse_unmovable(kwargs, ids)
        start, history = past - unclean, session.state.history
        again, positions = history.ids(start, stop), history.positions(start, stop)
        assert again is not None, "every decoded token's id was recorded"
        kwargs = placed(kwargs, past, start, again, positions)
        session.begin(Call(start, stop - start, stop - start, again=call.prompt == 0, hidden=unclean))
        cache.end_at(held, start)
        return kwargs

    def end(self, session: Session, output: Any) -> Any:
        """Take off what was run again: the caller gets hidden states for its own tokens only."""
        call = session.call
        surplus = call.hidden if call.slots is None else call.queries - 1
        if surplus:
            rows, kept = output[0].shape[0], output[0].shape[1] - surplus
            if isinstance(output, tuple):
                output = tuple(_trimmed(part, rows, surplus, kept) for part in output)
            else:
                for name, part in output.items():
                    output[name] = _trimmed(part, rows, surplus, kept)
        # `Upkeep` has counted a step that a graph may hold, whose replay does not come back here.
        if call.hidden:
            self.done.add(passes=1, rewritten=surplus)
        return output


def _trimmed(part: Any, rows: int, surplus: int, kept: int) -> Any:
    """A part of a decoder's output, `[B, n, d]`, `[B * n, d]` or of all layers, of each row's last `kept` positions."""
    if isinstance(part, tuple):
        return tuple(_trimmed(states, rows, surplus, kept) for states in part)
    if isinstance(part, Tensor) and part.shape[:2] == (rows, surplus + kept):
        return part[:, surplus:]
    flat = isinstance(part, Tensor) and part.dim() == 2 and part.shape[0] == rows * (surplus + kept)
    return part.unflatten(0, (rows, -1))[:, surplus:].flatten(0, 1) if flat else part


def refuse_unmovable(kwargs: dict[str, Any], ids: Tensor | None) -> None:
    """Raise an UnsupportedModelError for a decoding call without ids, or with inputs that only its caller can place."""
    if ids is None:
        raise UnsupportedModelError("rectification runs decoded tokens again, so it needs input_ids, not inputs_embeds")
    if kwargs.get("token_type_ids") is not None:
        raise UnsupportedModelError("rectification cannot run decoded tokens again: token_type_ids are the caller's")
    masks = kwargs.get("attention_mask")
    if isinstance(masks, dict) and len(masks) > 1:
        told = f"masks for {', '.join(masks)} are the caller's; pass one of two dimensions"
        raise UnsupportedModelError(f"rectification cannot run decoded tokens again: {told}")


def placed(kwargs: dict[str, Any], past: int, start: int, ids: Tensor, positions: Tensor | None) -> dict[str, Any]:
    """The inputs of a decoding call that came at `past` filled slots, changed to feed `ids` from slot `start` on.

    `ids` are int64 `[B, n]`; `positions` their position ids `[B, n]`, None where the model counts for itself.
    """
    stop = start + ids.shape[1]
    moved = {**kwargs, "input_ids": ids, "inputs_embeds": None}
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
