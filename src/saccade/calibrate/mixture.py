"""Attention that trains gates: every head attends densely and to its inherited set, mixed by its gate.

LycheeDecode, equation 5. A text is prefilled once, by stock attention. What follows it is decoded twice: by the
teacher, all heads dense, and by the student. Maps exist for one layer at a time; the backward pass makes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..adapters.hf.support import attention_modules
from ..eval.reader import prefilled
from ..selection.rules import Ratio

NAME = "saccade-mixture"
_SLOT = "_saccade_mixture"


@dataclass
class _Pass:
    """One forward pass over the tokens behind a text.

    Attributes:
        context: keys and values `[1, Hkv, T, d]` of the text, layer by layer.
        gates: float32 `[L - 1, Hkv]`; None: the teacher, all heads dense.
        kept: share of the row that a set holds.
        below: queries, text keys and own keys of the layer below, which choose this layer's set; None: the first layer.
    """

    context: Sequence[tuple[Tensor, Tensor]]
    gates: Tensor | None
    kept: float
    below: tuple[Tensor, Tensor, Tensor] | None = None


class Mixture:
    """A model whose tokens behind a text are decoded by mixed attention; `close` gives it its stock attention back.

    Args:
        model: in eval mode; its parameters must not require gradients.
        kept: share of the visible tokens that a set holds, the current one always among them (the paper's 30%).
    """

    def __init__(self, model: Any, kept: float) -> None:
        self._model, self._kept = model, kept
        self._slot: list[_Pass] = []
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, _no_mask)
        self._modules = attention_modules(model)
        for module in self._modules:
            module.__dict__[_SLOT] = self._slot

    def close(self) -> None:
        for module in self._modules:
            module.__dict__.pop(_SLOT, None)

    def read(self, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Prefill a text with stock attention; keys and values `[1, Hkv, T, d]` of each layer."""
        with torch.no_grad():
            layers: list[Any] = list(prefilled(self._model, tokens).layers)
        return [(layer.keys, layer.values) for layer in layers]

    def logits(
        self, context: Sequence[tuple[Tensor, Tensor]], tokens: Tensor, places: Tensor, gates: Tensor | None
    ) -> Tensor:
        """Logits `[N, V]`, float32, behind places (int64 `[N]`) of tokens (int64 `[n]`) that follow what `read` gave.

        `gates`: `[L - 1, Hkv]` of the layers above the first; None: every head dense.
        """
        past = context[0][0].shape[2]
        positions = torch.arange(past, past + len(tokens), device=tokens.device)[None]
        self._slot[:] = [_Pass(context, gates, self._kept)]
        stock = self._model.config._attn_implementation
        self._model.set_attn_implementation(NAME)
        try:
            output = self._model(tokens[None], position_ids=positions, use_cache=False, logits_to_keep=places)
        finally:
            self._model.set_attn_implementation(stock)
        logits: Tensor = output.logits[0]
        return logits.float()


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mixture masks for itself: its keys are not the call's."""


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """Mixed attention of new tokens: query `[1, Hq, n, d]`, their own keys and values `[1, Hkv, n, d]`.

    z A_dense V + (1 - z) A_sparse V; without gates A_dense V.
    """
    now: _Pass = getattr(module, _SLOT)[0]
    (keys, values), own, said = (both[0] for both in now.context[module.layer_idx]), key[0], value[0]
    q = query[0].unflatten(0, (key.shape[1], -1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    below = gates = None
    if now.gates is not None:
        below, now.below = now.below, (q.detach(), keys, own.detach())
        if below is not None:  # all heads of the first layer retrieve
            gates = now.gates[module.layer_idx - 1]

    def attend(weights: Tensor) -> Tensor:
        old, new = weights.to(q.dtype).tensor_split([keys.shape[1]], -1)
        read: Tensor = old @ values[:, None] + new @ said[:, None]
        return read

    def mixed() -> Tensor:
        """`[Hkv, g, n, d]`; the set is chosen in here, so that not even it is kept for the backward pass."""
        scores = _scores(q, keys, own) * scale
        dense = attend(scores.softmax(-1))
        if gates is None or below is None:
            return dense
        with torch.no_grad():
            chosen = _choose(*below, now.kept)
        sparse = attend(scores.masked_fill(~chosen[:, None], float("-inf")).softmax(-1))
        z = gates[:, None, None, None].to(q.dtype)
        return z * dense + (1 - z) * sparse

    output: Tensor = checkpoint(mixed, use_reentrant=False)
    return output.flatten(0, 1).transpose(0, 1)[None], None


def _scores(q: Tensor, keys: Tensor, key: Tensor) -> Tensor:
    """q·k of new tokens with the text and with one another, float32 `[Hkv, g, n, T + n]`; -inf where not yet said."""
    old, new = (q.float() @ k.float()[:, None].transpose(-1, -2) for k in (keys, key))
    later = torch.ones(new.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.cat((old, new.masked_fill(later, float("-inf"))), dim=-1)


def _choose(q: Tensor, keys: Tensor, key: Tensor, kept: float) -> Tensor:
    """The best `kept` of what each new token sees, by its group's mean score; bool `[Hkv, n, T + n]`.

    As at inference: the share is exact in decimals and rounded up, ties go to the lower position.
    """
    scores = _scores(q.float().mean(1, keepdim=True), keys, key)[:, 0]
    past, new = keys.shape[1], key.shape[1]
    own = torch.arange(new, device=q.device)
    scores[:, own, past + own] = float("inf")  # the current token is always attended to
    share = Ratio(kept)
    counts = torch.tensor([share.kept_of(past + number + 1) for number in range(new)], device=q.device)
    best = scores.topk(int(counts.max()), dim=-1).values
    cut = best.gather(-1, (counts - 1)[None, :, None].expand(scores.shape[0], -1, 1))
    above, tied = scores > cut, scores == cut
    return above | (tied & (tied.cumsum(-1) <= counts[:, None] - above.sum(-1, keepdim=True)))
