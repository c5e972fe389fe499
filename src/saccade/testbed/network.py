"""A Qwen3 network written for fast training on CPUs; its parameters carry the names of transformers' Qwen3."""

from math import sqrt
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config

EPSILON = 1e-6
OUTPUT_GAIN = 0.03  # tied embeddings are N(0, 1): with a gain of 1 the first logits would have a std of 14


def model_config(vocabulary: int, *, layers: int = 12, hidden: int = 192, feed_forward: int = 384) -> Qwen3Config:
    """The configuration of the bundled model, or of a smaller one for tests."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )


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

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, span: int) -> Tensor:
        """`states` [B, T, hidden]; `cosine`, `sine` [B, 1, T, head_dim]; only the last `span` tokens if positive."""
        batch, length, _ = states.shape
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        heads = functional.linear(states, weight).view(batch, length, -1, self.head_dim).transpose(1, 2)
        queries, keys, values = torch.split(heads, [self.heads, self.groups, self.groups], dim=1)
        queries = rotate(self.q_norm(queries), cosine, sine)
        keys = rotate(self.k_norm(keys), cosine, sine).repeat_interleave(self.heads // self.groups, dim=1)
        values = values.repeat_interleave(self.heads // self.groups, dim=1)
        mixed = attend(queries, keys, values, span)
        return cast("Tensor", self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1)))


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

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, span: int) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), cosine, sine, span)
        return cast("Tensor", states + self.mlp(self.post_attention_layernorm(states)))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, OUTPUT_GAIN)


class Network(nn.Module):
    """The causal language model: `model.*` as in Qwen3ForCausalLM, output tied to the embedding."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                silent = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=0.0 if silent else 1 / sqrt(parameter.shape[1]))

    def forward(self, tokens: Tensor, positions: Tensor, wanted: Tensor, span: int = 0, local: int = 0) -> Tensor:
        """Logits [N, vocabulary] at the N places where `wanted` holds; `tokens`, `positions`, `wanted` [B, T].

        The first `local` layers see only the last `span` tokens, if `span` is given.
        """
        cosine, sine = rotation(positions, self.config.head_dim)
        states = self.model.embed_tokens(tokens)
        for index, layer in enumerate(self.model.layers):
            states = layer(states, cosine, sine, span if index < local else 0)
        return functional.linear(self.model.norm(states[wanted]), self.model.embed_tokens.weight)


def rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [B, 1, T, head_dim] of the rotary embedding at `positions` [B, T]."""
    frequencies = 1_000_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = positions[:, None, :, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([cosine, cosine], -1).bfloat16(), torch.cat([-sine, sine], -1).bfloat16()


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of `states` [B, heads, T, head_dim]."""
    return states * cosine + states.roll(states.shape[-1] // 2, dims=-1) * sine


def attend(queries: Tensor, keys: Tensor, values: Tensor, span: int) -> Tensor:
    """Causal attention over all tokens, or over the last `span` ones; everything is [B, heads, T, head_dim].

    Short blocks are faster as plain matrix products, long ones in the fused kernel.
    """
    batch, heads, length, width = queries.shape
    if 0 < span < length:
        blocks = length // span
        queries, keys, values = (x.reshape(-1, blocks, span, width) for x in (queries, keys, values))
        keys = torch.cat([keys.roll(1, dims=1), keys], dim=2)
        values = torch.cat([values.roll(1, dims=1), values], dim=2)
        hidden = torch.ones(span, 2 * span, dtype=torch.bool)
        hidden = (hidden.tril() | hidden.triu(span + 1)).repeat(blocks, 1, 1)
        hidden[0, :, :span] = True
    elif length <= 256:
        queries, keys, values = (x.reshape(-1, 1, length, width) for x in (queries, keys, values))
        hidden = torch.ones(1, length, length, dtype=torch.bool).triu(1)
    else:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    penalty = torch.zeros(hidden.shape, dtype=queries.dtype).masked_fill(hidden, -1e4)
    scores = queries * width**-0.5 @ keys.mT + penalty
    mixed: Tensor = scores.softmax(-1) @ values
    return mixed.view(batch, heads, length, width)
