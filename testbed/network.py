"""A Qwen3 network written for fast training; its parameters carry the names of transformers' Qwen3."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import Qwen3Config

EPSILON = 1e-6
SHORT = 256  # rows up to this length are faster on a CPU as plain matrix products
OUTPUT_GAIN = 0.03  # tied embeddings are N(0, 1): with a gain of 1 the first logits would have a std of 14


def model_config(
    vocabulary: int, *, layers: int = 12, hidden: int = 224, feed_forward: int = 448, positions: int = 32768
) -> Qwen3Config:
    """The configuration of the bundled model, or of another one with heads like its own."""
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0}, rms_norm_eps=EPSILON,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0, dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.rope_theta = 1_000_000.0  # where transformers 4 reads it
    return config


@dataclass(frozen=True)
class Sight:
    """What training lets a layer's heads see.

    `span`: the tokens behind it that a token sees, 0 = all; `wide`: the range of KV heads whose queries in the
    second half of the row see everything all the same.
    """

    span: int = 0
    wide: tuple[int, int] = (0, 0)


class Norm(nn.Module):
    """RMS norm in float32, returned in the dtype of its input."""

    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), gain))

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weight.to(states.dtype), EPSILON)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads or 1
        self.head_dim = config.head_dim
        width = config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.q_norm = Norm(self.head_dim)
        self.k_norm = Norm(self.head_dim)

    def project(self, states: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, head_dim] of `states` [B, T, hidden]."""
        batch, length, _ = states.shape
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        heads = functional.linear(states, weight).view(batch, length, -1, self.head_dim).transpose(1, 2)
        queries, keys, values = torch.split(heads, [self.heads, self.groups, self.groups], dim=1)
        queries = rotate(self.q_norm(queries), cosine, sine)
        keys = rotate(self.k_norm(keys), cosine, sine).repeat_interleave(self.heads // self.groups, dim=1)
        values = values.repeat_interleave(self.heads // self.groups, dim=1)
        return queries.to(values.dtype), keys.to(values.dtype), values


class FeedForward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return cast("Tensor", self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states)))


class Layer(nn.Module):
    """Attention and feed-forward block, each behind a norm and beside a residual connection."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size)
        self.mlp = FeedForward(config)

    def before(self, states: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before attention."""
        return self.self_attn.project(self.input_layernorm(states), cosine, sine)

    def after(self, states: Tensor, mixed: Tensor) -> Tensor:
        """What comes behind attention."""
        states = states + self.self_attn.o_proj(mixed.transpose(1, 2).reshape(*states.shape[:2], -1))
        return cast("Tensor", states + self.mlp(self.post_attention_layernorm(states)))

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, sight: Sight) -> Tensor:
        """`states` [B, T, hidden]; `cosine`, `sine` [B, 1, T, head_dim]."""
        first, last = (head * self.self_attn.heads // self.self_attn.groups for head in sight.wide)
        queries, keys, values = self.before(states, cosine, sine)
        return self.after(states, attend(queries, keys, values, sight.span, (first, last)))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, OUTPUT_GAIN)


class Network(nn.Module):
    """The causal language model: `model.*` as in Qwen3ForCausalLM, output tied to the embedding.

    `rotary`: the dtype of the rotary embedding. bfloat16, which the bundled model was trained with, rounds angles to
    one part in 256; transformers' are exact.
    """

    def __init__(self, config: Qwen3Config, rotary: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config, self.rotary = config, rotary
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                silent = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=0.0 if silent else 1 / sqrt(parameter.shape[1]))

    def compile_layers(self) -> None:
        """Compile what lies between the attentions: on a GPU these many small steps cost more than attention."""
        for layer in self.model.layers:
            for name in ("before", "after"):
                setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True))

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor, sights: Sequence[Sight] = ()) -> Tensor:
        """Logits [N, vocabulary] at the N places `wanted` of the flattened `tokens`; `tokens`, `positions` [B, T].

        `sights` restricts what the layers see, one for each layer; the default is no restriction.
        """
        cosine, sine = rotation(positions, self.config.head_dim, self.rotary)
        states = self.model.embed_tokens(tokens)
        for layer, sight in zip(self.model.layers, sights or [Sight()] * len(self.model.layers), strict=True):
            states = layer(states, cosine, sine, sight)
        states = states.flatten(0, 1).index_select(0, wanted)
        return functional.linear(self.model.norm(states), self.model.embed_tokens.weight)


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [B, 1, T, head_dim] of the rotary embedding at `positions` [B, T]."""
    frequencies = 1_000_000.0 ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = positions[:, None, :, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([cosine, cosine], -1).to(dtype), torch.cat([-sine, sine], -1).to(dtype)


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of `states` [B, heads, T, head_dim]."""
    return states * cosine + states.roll(states.shape[-1] // 2, dims=-1) * sine


def attend(queries: Tensor, keys: Tensor, values: Tensor, span: int, wide: tuple[int, int] = (0, 0)) -> Tensor:
    """Causal attention over all tokens, or over the last `span` ones; everything is [B, heads, T, head_dim].

    With a `span`, queries in the second half of the row see everything in heads `wide[0]` to `wide[1]` - 1.
    """
    length = queries.shape[2]
    if not 0 < span < length:
        if length > SHORT or queries.is_cuda:
            return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = torch.ones(1, length, length, dtype=torch.bool, device=queries.device).triu(1)
        return weigh(queries, keys, values, 1, hidden)
    mixed = within_span(queries, keys, values, span)
    first, last = wide
    if first == last:
        return mixed
    queries, keys, values = (x[:, first:last] for x in (queries, keys, values))
    half = length // 2
    mask = causal_lower_right(length - half, length)
    far = functional.scaled_dot_product_attention(queries[:, :, half:], keys, values, attn_mask=mask)
    seen = torch.cat([mixed[:, first:last, :half], far], dim=2)
    return torch.cat([mixed[:, :first], seen, mixed[:, last:]], dim=1)


def within_span(queries: Tensor, keys: Tensor, values: Tensor, span: int) -> Tensor:
    """Causal attention over the last `span` tokens: each block of queries sees its own block and the one before."""
    blocks = queries.shape[2] // span
    queries, keys, values = (x.unflatten(2, (blocks, span)) for x in (queries, keys, values))
    keys = torch.cat([keys.roll(1, dims=2), keys], dim=3)
    values = torch.cat([values.roll(1, dims=2), values], dim=3)
    hidden = torch.ones(span, 2 * span, dtype=torch.bool, device=queries.device)
    hidden = (hidden.tril() | hidden.triu(span + 1)).repeat(blocks, 1, 1)
    hidden[0, :, :span] = True
    return weigh(queries, keys, values, blocks, hidden)


def weigh(queries: Tensor, keys: Tensor, values: Tensor, blocks: int, hidden: Tensor) -> Tensor:
    """Attention of blocks that may not see what is `hidden` [blocks, queries, keys], as plain matrix products.

    They are faster than the fused kernel for short blocks.
    """
    batch, heads, width = queries.shape[0], queries.shape[1], queries.shape[-1]
    queries, keys, values = (x.reshape(batch * heads, blocks, -1, width) for x in (queries, keys, values))
    penalty = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device).masked_fill(hidden, -1e4)
    scores = queries * width**-0.5 @ keys.mT + penalty
    mixed: Tensor = scores.softmax(-1).to(values.dtype) @ values
    return mixed.view(batch, heads, -1, width)
