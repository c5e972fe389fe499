"""Dense decoding attention on CPU: two passes over the key axis with the small score matrix kept in between."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.kernels._dot import KEY_BLOCK, score_keys, scratch, softened, weigh_values
from saccade.kernels._flat import RowReader, host_bounds, shared_slice
from saccade.kernels._pooling import grouped
from saccade.kernels._softmax import beside_sinks, capped
from saccade.types import KVView, Pooling, Softmax

# Below this many numbers in the keys, the cost of calls outweighs that of passes through memory.
_SMALL = 1 << 20


def decode_scores(q: Tensor, kv: KVView, pooling: Pooling) -> Tensor:
    queries = grouped(q, kv.kv_heads)
    if pooling == "mean":
        queries = queries.mean(dim=2, keepdim=True)
    raw = _raw_scores(queries, kv, kept=pooling != "max")
    return raw.amax(dim=2) if pooling == "max" else raw.flatten(1, 2)


def dense_decode_scores(
    q: Tensor, kv: KVView, softmax: Softmax, pooling: Pooling | None
) -> tuple[Tensor, Tensor | None]:
    if pooling is None and softmax.sinks is None and softmax.cap is None:
        together = _fused(q, kv, softmax.scale)
        if together is not None:
            return together, None
    queries = grouped(q, kv.kv_heads)
    group = queries.shape[2]
    if pooling == "mean":
        # One more row of the same product costs nothing next to reading the keys.
        queries = torch.cat((queries, queries.mean(dim=2, keepdim=True)), dim=2)
    raw = _raw_scores(queries, kv, kept=pooling == "each")
    scores: Tensor | None = None
    if pooling == "max":
        scores = raw.amax(dim=2)
    elif pooling == "mean":
        scores = raw[:, :, group].clone()
    elif pooling == "each":
        scores = raw.flatten(1, 2)
    raw, scale = raw[:, :, :group], softmax.scale
    if softmax.cap is not None:
        raw, scale = capped(raw * scale, softmax.cap), 1.0
    kept = None if softmax.sinks is None else beside_sinks(raw * scale, softmax.sinks)
    out = _mix(raw, kv, scale)
    if kept is not None:
        out = out * kept
    return out.reshape(q.shape).to(q.dtype), scores


def _fused(q: Tensor, kv: KVView, scale: float) -> Tensor | None:
    """Torch's own attention, the group folded into its query length: the fastest while the cache is small."""
    keys, values = shared_slice(kv.k, kv.rows), shared_slice(kv.v, kv.rows)
    if keys is None or values is None or keys.numel() > _SMALL or not q.dtype == keys.dtype == values.dtype:
        return None
    queries = q.reshape(q.shape[0], kv.kv_heads, -1, kv.head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, keys.transpose(1, 2), values.transpose(1, 2), scale=scale
    )
    return out.reshape(q.shape)


def _raw_scores(queries: Tensor, kv: KVView, *, kept: bool) -> Tensor:
    """Scores `[B, Hkv, r, max_len]` of queries `[B, Hkv, r, d]`, in scratch memory unless they are kept."""
    shape = (*queries.shape[:3], kv.rows.max_len)
    raw = queries.new_empty(shape) if kept else scratch("scores", shape)
    together = shared_slice(kv.k, kv.rows)
    if together is not None and together.numel() <= _SMALL:
        length = together.shape[1]
        raw[..., length:] = -torch.inf
        raw[..., :length] = queries @ together.permute(0, 2, 3, 1).float()
        return raw
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        raw[row, :, :, length:] = -torch.inf
        keys = RowReader(kv.k, kv.rows, row, start, length)
        for head in range(kv.kv_heads):
            target = raw[row, head]
            for first in range(0, length, KEY_BLOCK):
                last = min(first + KEY_BLOCK, length)
                score_keys(queries[row, head], keys.read(head, first, last), target[:, first:last])
    return raw


def _mix(raw: Tensor, kv: KVView, scale: float) -> Tensor:
    """Outputs `[B, Hkv, g, d]` from raw scores `[B, Hkv, g, max_len]`."""
    together = shared_slice(kv.v, kv.rows)
    if together is not None and together.numel() <= _SMALL:
        weights = softened(raw[..., : together.shape[1]], scale)
        return weights @ together.transpose(1, 2).float()
    out = raw.new_empty((*raw.shape[:3], kv.head_dim))
    for row, (start, length) in enumerate(host_bounds(kv.rows)):
        values = RowReader(kv.v, kv.rows, row, start, length)
        for head in range(kv.kv_heads):
            # Head by head, so that the weights are still in cache when the values come.
            weights = softened(raw[row, head, :, :length], scale)
            out[row, head] = weigh_values(weights, values.read(head, 0, length))
    return out
