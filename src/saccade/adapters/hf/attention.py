"""The attention function registered with transformers: prompt positions go to stock sdpa, decoding ones to `attend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...errors import AttachmentError, UnsupportedModelError
from ...runtime import attend
from .session import Session, lasting

NAME = "saccade"
SESSION_ATTRIBUTE = "_saccade_session"
"""Set on every attention module of an attached model: a one-slot list that holds the session of the call at hand."""

_REFUSED = {
    "softcap": "a logit soft-cap changes the scores that selection ranks",
    "s_aux": "attention sinks as parameters are not part of the cache",
    "position_bias": "a position bias changes the scores that selection ranks",
}


def register() -> None:
    """Make the name known to transformers; idempotent, called on the first attachment, never on import."""
    AttentionInterface.register(NAME, attention_forward)
    # Without the mask function the attention would get None and padded rows would be silently wrong.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for queries `[B, Hq, n, d]` over keys and values `[B, Hkv, T, d]`; returns `[B, n, Hq, d]`.

    Gradients flow through prompt positions only.

    Raises:
        AttachmentError: if the module belongs to no attached model.
        UnsupportedModelError: for a call with features that selection cannot honour.
    """
    session = _session(module)
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"layer {module.layer_idx} passes {name}: {reason}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    prompt, total = session.call.prompt, query.shape[2]
    outputs = []
    if prompt > 0:
        mask, keys, values = attention_mask, key, value
        if prompt < total:
            end = session.call.past + prompt
            mask = None if mask is None else mask[:, :, :prompt, :end]
            keys, values = key[:, :, :end], value[:, :, :end]
        output, _ = sdpa_attention_forward(
            module, query[:, :, :prompt], keys, values, mask, dropout=dropout, scaling=scale, **kwargs
        )
        if prompt == total:
            return output, None
        outputs.append(output)
    with lasting():
        for position, view in enumerate(session.views(key, value, attention_mask)):
            q = query[:, :, prompt + position]
            outputs.append(attend(session.state, module.layer_idx, q, view, scale=scale, position=position)[:, None])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _session(module: nn.Module) -> Session:
    slot = getattr(module, SESSION_ATTRIBUTE, None)
    if not slot:
        raise AttachmentError(
            f"a layer asks for the attention implementation {NAME!r}, but its model is not attached; "
            "use saccade.sparsify(model, policy)"
        )
    session: Session = slot[0]
    return session
