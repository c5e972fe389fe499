"""Attention that trains gates: every head attends densely and to its inherited set, mixed by its gate.

LycheeDecode, equation 5. A text is prefilled once, by stock attention. What follows it is decoded twice: by the
teacher, all heads dense, and by the student. Maps exist for one layer at a time; the backward pass makes them again.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from ..adapters.hf.attention import is_eager, stock_of
from ..adapters.hf.support import attention_modules, cached
from ..checkpoints.shape import shape_of
from ..eval.reader import prefilled
from ..eval.snapshot import Snapshot
from ..kernels._softmax import capped
from ..kernels.topk.api import topk_and_last
from ..selection.rules import Ratio
from ..selection.rules.framed import keep_frame


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mixture masks for itself: its keys are not the call's."""


NAME = "saccade-mixture"
_MASKS: dict[str, Callable[..., Any]] = {NAME: _no_mask, f"{NAME}-sdpa": sdpa_mask, f"{NAME}-eager": eager_mask}
"""Names by which transformers knows it; the latter make masks for layers of other kinds, as their attention reads them.
"""
_MIXTURE, _STOCK = "_saccade_mixture", "_saccade_mixture_stock"


@dataclass(frozen=True, slots=True)
class Text:
    """A text that was read.

    Attributes:
        layers: keys and values `[1, Hkv, T, d]` of the layers with full attention, in order.
        cache, others: where other layers go on from; None where there are none.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    cache: Any = None
    others: Snapshot | None = None

    def behind(self) -> Any:
        """A cache for tokens that follow; of layers with full attention it holds nothing."""
        if self.others is None:
            return None
        cache, past = copy(self.cache), self.layers[0][0].shape[2]
        numbered = enumerate(self.cache.layers)
        full = self.others.full
        cache.layers = [_Apart(past) if number in full else _unwritten(layer) for number, layer in numbered]
        self.others.put_back(cache)
        return cache


class _Apart(DynamicLayer):
    """Gives new tokens their own keys and values; those of the `past` tokens before them are elsewhere."""

    def __init__(self, past: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.past, self.is_initialized = past, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.past


def _unwritten(layer: Any) -> Any:
    """A copy whose recurrent state, if it has one, is read and not written to: a gradient may need it."""
    copied = copy(layer)
    if hasattr(layer, "update_recurrent_state"):
        # Nothing comes behind a pass, so that nobody asks for the state.
        copied.update_recurrent_state = lambda states, *_, **__: states
    return copied


@dataclass
class _Pass:
    """One forward pass over the tokens behind a text.

    Attributes:
        context: keys and values `[1, Hkv, T, d]` of the text, by the number of the layer.
        gates: float32 `[Hkv]` by the number of the layer, none for the first; None: the teacher, all heads dense.
        below: queries, text keys and own keys of the layer below, which choose this layer's set; None: the first layer.
    """

    context: dict[int, tuple[Tensor, Tensor]]
    gates: dict[int, Tensor] | None
    below: tuple[Tensor, Tensor, Tensor] | None = None


class Mixture:
    """A model whose tokens behind a text are decoded by mixed attention; `close` gives it its stock attention back.

    Layers without full attention keep their own, and their caches.

    Args:
        model: in eval mode; its parameters must not require gradients.
        kept: share of the visible tokens that a set holds, the current one always among them (the paper's 30%).
        frugal: hold one layer's maps at a time and make them again in the backward pass; else hold those of all layers,
            which saves a third of a step's time.
    """

    def __init__(self, model: Any, kept: float, *, frugal: bool = True) -> None:
        self._model, self.kept, self.frugal, self._shape = model, kept, frugal, shape_of(model.config)
        self.now = _Pass({}, None)
        for name, mask in _MASKS.items():
            AttentionInterface.register(name, _attention)
            AttentionMaskInterface.register(name, mask)
        self._modules, stock = attention_modules(model), model.config._attn_implementation
        self.caps = stock != "sdpa"  # all others apply soft-caps
        others = [module for module in self._modules if module.layer_idx not in self._shape.full_layers]
        eager = any(is_eager(module, stock) for module in others)
        self._mixed = bool(self._shape.kinds)
        self._name = NAME if not self._mixed else f"{NAME}-eager" if eager else f"{NAME}-sdpa"
        for module in others:
            module.__dict__[_STOCK] = stock_of(module, stock)

    def close(self) -> None:
        for module in self._modules:
            module.__dict__.pop(_MIXTURE, None)
            module.__dict__.pop(_STOCK, None)

    def read(self, tokens: Sequence[int]) -> Text:
        """Prefill a text with stock attention."""
        with torch.no_grad():
            cache = prefilled(self._model, tokens)
            read = (cache.layers[self._shape.sources.get(number, number)] for number in self._shape.full_layers)
            layers = [(layer.keys, layer.values) for layer in read]
            return Text(layers, cache, Snapshot.of(cache, self._shape.full_layers)) if self._mixed else Text(layers)

    def logits(self, text: Text, tokens: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
        """Logits `[N, V]`, float32, behind places (int64 `[N]`) of tokens that follow a text; see `follow`."""
        logits: Tensor = self.follow(text, tokens, gates, logits_to_keep=places).logits[0]
        return logits.float()

    def follow(self, text: Text, tokens: Tensor, gates: Tensor | None, **asked: Any) -> Any:
        """What the model gives for tokens (int64 `[n]`) that follow what `read` gave; `asked` is passed on to it.

        `gates`: `[F - 1, Hkv]` of the layers with full attention above the first; None: every head dense.
        """
        past, full = text.layers[0][0].shape[2], self._shape.full_layers
        positions = torch.arange(past, past + len(tokens), device=tokens.device)[None]
        above = None if gates is None else dict(zip(full[1:], gates, strict=True))
        self.now = _Pass(dict(zip(full, text.layers, strict=True)), above)
        for module in self._modules:  # another mixture may have had them
            module.__dict__[_MIXTURE] = self
        stock, cache = self._model.config._attn_implementation, text.behind()
        inputs = {"position_ids": positions, **cached(self._model, cache), "use_cache": cache is not None}
        self._model.set_attn_implementation(self._name)
        try:
            return self._model(tokens[None], **asked, **inputs)
        finally:
            self._model.set_attn_implementation(stock)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """Mixed attention of new tokens: query `[1, Hq, n, d]`, their own keys and values `[1, Hkv, n, d]`.

    z A_dense V + (1 - z) A_sparse V; without gates A_dense V.
    """
    stock: Callable[..., tuple[Tensor, None]] | None = getattr(module, _STOCK, None)
    if stock is not None:
        return stock(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    mixture: Mixture = getattr(module, _MIXTURE)
    now = mixture.now
    (keys, values), own, said = (both[0] for both in now.context[module.layer_idx]), key[0], value[0]
    q = query[0].unflatten(0, (key.shape[1], -1))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks: Tensor | None = kwargs.get("s_aux")
    cap: float | None = kwargs.get("softcap") if mixture.caps else None
    below = gates = None
    if now.gates is not None:
        below, now.below = now.below, (q.detach(), keys, own.detach())
        if below is not None:  # all heads of the first layer retrieve
            gates = now.gates[module.layer_idx]

    def attend(scores: Tensor) -> Tensor:
        # A group's rows are one product's, so that values are not repeated for each.
        weights = _softmax(scores, sinks).to(q.dtype).flatten(1, 2)
        return (weights @ torch.cat((values, said), dim=1)).view(*q.shape[:3], -1)

    def mixed() -> Tensor:
        """`[Hkv, g, n, d]`; the set is chosen in here, so that not even it is kept for the backward pass."""
        scores = capped(_scores(q, keys, own, scale), cap)
        dense = attend(scores)
        if gates is None or below is None:
            return dense
        with torch.no_grad():
            chosen = _choose(*below, mixture.kept)
        sparse = attend(scores.masked_fill(~chosen[:, None], float("-inf")))
        z = gates[:, None, None, None]
        return (z * dense + (1 - z) * sparse).to(q.dtype)

    output: Tensor = checkpoint(mixed, use_reentrant=False) if mixture.frugal else mixed()
    return output.flatten(0, 1).transpose(0, 1)[None], None


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of scores `[Hkv, g, n, N]`; sinks `[Hq]` are each head's score of one more token, which has no value."""
    if sinks is None:
        return scores.softmax(-1)
    one_more = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, one_more), dim=-1).softmax(-1)[..., :-1]


def _scores(q: Tensor, keys: Tensor, key: Tensor, scale: float = 1.0) -> Tensor:
    """q·k of new tokens with the text and with one another, float32 `[Hkv, g, n, T + n]`; -inf where not yet said."""
    row = torch.cat((keys, key), dim=1).float()[:, None].expand(-1, q.shape[1], -1, -1).flatten(0, 1)
    later = torch.full((q.shape[2], row.shape[1]), float("-inf"), device=q.device).triu(keys.shape[1] + 1)
    return torch.baddbmm(later, q.float().flatten(0, 1), row.transpose(-1, -2), alpha=scale).view(*q.shape[:3], -1)


def _choose(q: Tensor, keys: Tensor, key: Tensor, kept: float) -> Tensor:
    """The best `kept` of what each new token sees, by its group's mean score; bool `[Hkv, n, T + n]`.

    As at inference: the share is exact in decimals and rounded up, the current token, sinks and a window always among
    them, ties go to the lower position.
    """
    scores, rule = _scores(q.float().mean(1, keepdim=True), keys, key)[:, 0], Ratio(kept)
    heads, new, seen = scores.shape
    lengths = torch.arange(seen - new + 1, seen + 1, dtype=torch.int32, device=q.device)
    most, sizes = rule.size(seen, 1), rule.share.of_each(lengths)
    keep_frame(scores.transpose(0, 1), lengths, sizes)
    if not scores.is_cpu:  # kernels there are made for the few rows of a step, and compiled anew as lengths change
        return best_of_each(scores, sizes, rule.size(seen - new + 1, 1), most)
    ids, _ = topk_and_last(scores.transpose(0, 1), lengths, most - 1, 1, share=rule.share)
    chosen = torch.zeros((new, heads, seen + 1), dtype=torch.bool, device="cpu")
    chosen.scatter_(2, ids.long() % (seen + 1), value=True)  # -1, which is none, falls behind the last token
    return chosen[..., :-1].transpose(0, 1)


def best_of_each(scores: Tensor, counts: Tensor, least: int, most: int) -> Tensor:
    """The best `counts` `[n]` of each of the last tokens, itself among them: bool `[Hkv, n, T + n]` of such scores.

    Counts, the first of which is `least` and the last `most`, never fall; nothing here waits for the device.
    """
    scores[:, :, scores.shape[2] - len(counts) :].diagonal(dim1=1, dim2=2).fill_(float("inf"))
    last = scores.topk(most, dim=-1, sorted=False).values.topk(most - least + 1, dim=-1, largest=False).values
    cut = last.gather(-1, (most - counts.long())[None, :, None].expand(scores.shape[0], -1, 1))
    above, tied = scores > cut, scores == cut
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= counts[:, None] - above.sum(-1, keepdim=True)))
