"""Equations 1 to 5 of LycheeDecode in float64 inside stock transformers models, and models fit for that."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from adapters import tiny

NAME = "naive-mixture"


def exact(kind: str, kv_heads: int, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A tiny model that computes in float64 throughout: transformers' norms round to float32 whatever the model is."""
    model = tiny.fresh(kind, num_key_value_heads=kv_heads, **{"head_dim": 8, **changes}).to(dtype)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and dtype == torch.float64:
            module.forward = _norm(module)
    return model


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return module.weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)

    return forward


class Naive:
    """Logits of a text and what follows it in one pass, without any cache.

    Args:
        model: attached for the time of a call.
        past: tokens of the text, where every head attends to everything.
        gates: `[L - 1, Hkv]`, whose gradient is followed; None: every head attends to everything behind the text, too.
        kept: share of the visible tokens in a set, as a decimal number.
        jitter: relative noise of every score, to see how far such noise reaches.
    """

    def __init__(self, model: Any, past: int, gates: Tensor | None, kept: float, jitter: float = 0.0) -> None:
        self.model, self.past, self.gates, self.kept = model, past, gates, Fraction(str(kept))
        self.jitter = jitter
        self.sets: dict[int, dict[tuple[int, int], list[int]]] = {}
        """By layer that chose them, then KV head and position."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        with self._attached():
            return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    @contextmanager
    def _attached(self) -> Iterator[None]:
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)
        stock = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self.model.set_attn_implementation(stock)

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        layer, (q, k, v) = module.layer_idx, (tensor[0].double() for tensor in (query, key, value))
        group, length = q.shape[0] // k.shape[0], q.shape[1]
        read = [head // group for head in range(q.shape[0])]
        scores = q @ k[read].transpose(1, 2) * scaling
        if self.jitter:
            # Of what a row sees alone.
            noise = [torch.randn(at + 1, dtype=torch.float64) for _ in read for at in range(length)]
            padded = [torch.nn.functional.pad(row, (0, length - len(row))) for row in noise]
            scores = scores * (1 + self.jitter * torch.stack(padded).view(scores.shape))
        out = _attend(scores, v[read], torch.ones(length, length).tril() > 0)
        if self.gates is not None and layer > 0:
            chosen = torch.zeros(k.shape[0], length, length) > 0
            for (kv, at), places in self.sets[layer - 1].items():
                chosen[kv, at, places] = True
            z, new = self.gates[layer - 1][read][:, None, None], slice(self.past, length)
            sparse = _attend(scores[:, new], v[read], chosen[read, new])
            out = torch.cat((out[:, : self.past], z * out[:, new] + (1 - z) * sparse), dim=1)
        self.sets[layer] = {}
        if self.gates is not None:
            for kv in range(k.shape[0]):
                pooled = sum(q[kv * group + member] for member in range(group)) / group
                for at in range(self.past, length):
                    self.sets[layer][kv, at] = self._best(pooled[at], k[kv], at)
        return out.transpose(0, 1)[None].to(query), None

    def _best(self, q: Tensor, keys: Tensor, at: int) -> list[int]:
        """Of k = `ceil(kept * visible)`: the current token, sinks, window, best others; ties to the lower place."""
        count = math.ceil(self.kept * (at + 1))
        first, last = min(128, count // 8), min(256, count // 4)
        chosen = {at, *range(first), *range(at + 1 - last, at + 1)}
        scores = (keys @ q).tolist()
        ranked = sorted({*range(at)} - chosen, key=lambda other: (-scores[other], other))
        return sorted([*chosen, *ranked[: count - len(chosen)]])


def _attend(scores: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
    """Softmax over the chosen places of each row, `[H, new, T]`, times values."""
    left = scores.masked_fill(~chosen, -math.inf)
    weights = torch.exp(left - left.amax(-1, keepdim=True))
    return weights @ values / weights.sum(-1, keepdim=True)
