"""The attention function registered with transformers: prompts go to stock attention, decoded tokens to `attend`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from ...checkpoints.unsupported import POSITION_BIAS
from ...decode.attend import attend
from ...errors import AttachmentError, KernelError, UnsupportedModelError
from ...kernels.dense_pass.api import dense_pass
from ...types import Softmax
from .call import Call
from .effect import require_shape
from .session import AtHand, lasting

NAME, EAGER = "saccade", "saccade_eager"
"""What transformers knows us by; the second where a model's own attention is eager, which wants masks to add."""

SESSION_ATTRIBUTE = "_saccade_session"
"""Set on attention modules that a policy concerns: their `AtHand`, which knows the session of the call at hand."""

STOCK_ATTRIBUTE = "_saccade_stock"
"""Set on the attention modules of a model with layers of several kinds: what computes whatever no policy concerns."""


def register() -> None:
    """Make the name known to transformers; idempotent, called on the first attachment, never on import."""
    for name, mask in ((NAME, sdpa_mask), (EAGER, eager_mask)):
        AttentionInterface.register(name, attention_forward)
        # Without the mask function the attention would get None and padded rows would be silently wrong.
        AttentionMaskInterface.register(name, mask)


def stock_of(module: Any, implementation: str) -> Callable[..., Any]:
    """The function that an attention module was left to before: its model's eager one, or sdpa for what reads masks.

    Raises an UnsupportedModelError if the model's code has no eager one.
    """
    if not is_eager(module, implementation):
        return sdpa_attention_forward
    eager: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        told = "its code has no eager attention of the usual name; load it with attn_implementation='sdpa'"
        raise UnsupportedModelError(f"saccade cannot run {type(module).__name__}: {told}")
    return eager


def is_eager(module: Any, implementation: str) -> bool:
    """Whether the model's eager function computes what stock does: of those that read masks it alone knows sinks, and
    the caps that all functions apply but sdpa."""
    return (
        implementation == "eager" or has_sinks(module) or (soft_cap_of(module) is not None and implementation != "sdpa")
    )


def has_sinks(module: Any) -> bool:
    """Whether an attention module has sinks as parameters."""
    return isinstance(getattr(module, "sinks", None), Tensor)


def soft_cap_of(module: Any) -> float | None:
    """The soft-cap of an attention module's logits."""
    cap: float | None = getattr(module, "attn_logit_softcapping", None)
    return cap


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
    stock: Callable[..., tuple[Tensor, None]] = getattr(module, STOCK_ATTRIBUTE, sdpa_attention_forward)
    if hasattr(module, STOCK_ATTRIBUTE) and not hasattr(module, SESSION_ATTRIBUTE):
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    at_hand: AtHand | None = getattr(module, SESSION_ATTRIBUTE, None)
    # A backward pass runs checkpoints again, later, perhaps in autograd's thread; gradients flow through prompts only.
    backward, total = is_backward(), query.shape[2]
    if at_hand is None or (at_hand.session is None and not backward):
        raise AttachmentError(
            f"a layer asks for the attention implementation {NAME!r}, but its model is not attached: use "
            "saccade.sparsify(model, policy), call no part of it alone, and share neither layers nor configuration"
        )
    session = None if backward else at_hand.session
    call = Call(0, total, total) if session is None else session.call
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(f"layer {module.layer_idx} passes position_bias: {POSITION_BIAS}")
    # As stock has it: torch's function knows of no cap.
    cap = None if stock is sdpa_attention_forward else kwargs.get("softcap")
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("s_aux"), cap)
    prompt = call.prompt
    if session is not None:
        if total == 1 and prompt == call.queries and module.layer_idx not in session.keeping:
            prompt = 1  # a layer that keeps nothing may leave all of a prompt out but its last token
        seen = call.queries if prompt == total else total, key.shape[2]
        if not session.paged:
            require_shape(module.layer_idx, seen, call.past, call.queries, fixed=session.fixed)
        session.answered.add(module.layer_idx)
    if session is not None and call.again:
        with _answering(module.layer_idx):
            (view,) = session.views(key, value, attention_mask)
            if call.slots is not None:
                # A step that a graph holds takes in its own token and no others.
                session.state.indexes.of(module.layer_idx, view)
            return dense_pass(query, view, softmax), None
    outputs = []
    if prompt > 0:
        mask, keys, values = attention_mask, key, value
        if prompt < total:
            end = call.past + prompt
            mask = None if mask is None else mask[:, :, :prompt, :end]
            keys, values = key[:, :, :end], value[:, :, :end]
        given = {**kwargs, "dropout": dropout, "scaling": softmax.scale}
        output, _ = stock(module, query[:, :, :prompt], keys, values, mask, **given)
        if prompt == total:
            return output, None
        outputs.append(output)
    assert session is not None, "only prompts are run again"
    with _answering(module.layer_idx):
        for position, view in enumerate(session.views(key, value, attention_mask)):
            q = query[:, :, prompt + position]
            outputs.append(attend(session.state, module.layer_idx, q, view, softmax, position=position)[:, None])
    if torch.is_grad_enabled() and query.requires_grad:
        decoded: Callable[..., Tensor] = _Decoded.apply
        outputs = [*outputs[: prompt > 0], *(decoded(query, output) for output in outputs[prompt > 0 :])]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


@contextmanager
def _answering(layer: int) -> Iterator[None]:
    """As `lasting`; what the kernels refuse is said of the layer whose cache they were given."""
    with lasting():
        try:
            yield
        except KernelError as error:
            advice = "decode from a cache that calls of the model have filled, batch and mask unchanged since"
            raise UnsupportedModelError(f"layer {layer} cannot decode from this cache: {error}; {advice}") from error


class _Decoded(torch.autograd.Function):
    """What attention made of a decoded token: a loop may forget `no_grad`, but nobody gets wrong gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedModelError(
            "gradients flow through prompts only, not through sparsely decoded tokens; decode under torch.no_grad()"
        )


def is_backward() -> bool:
    """Whether a backward pass runs checkpoints again."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
