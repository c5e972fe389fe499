"""Chunk keys in plain torch, for any device and layout: fixed shapes, no host synchronisation."""

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens
from saccade.types import KVView

BLOCK = 4096
"""Tokens whose keys are copied at a time."""


def pool(kv: KVView, edges: Tensor, longest: int, pooling: str) -> Tensor:
    """Pooled keys float32 `[B, Hkv, C, d]`."""
    wide = max(BLOCK // (edges.shape[0] * longest), 1)
    blocks = [_pool(kv, edges[:, i : i + wide + 1], longest, pooling) for i in range(0, edges.shape[1] - 1, wide)]
    return torch.cat(blocks, dim=2)


def _pool(kv: KVView, edges: Tensor, longest: int, pooling: str) -> Tensor:
    positions = edges[:, :-1, None] + torch.arange(longest, device=edges.device)
    tokens = gather_tokens(kv.k, kv.k_scale, kv.rows, positions.flatten(1)).flatten(0, 1)
    # Every other run is what was read behind a chunk.
    sizes = edges.diff(dim=1).clamp(0, longest)
    lengths = torch.stack((sizes, longest - sizes), dim=-1).flatten()
    shape = (edges.shape[0], edges.shape[1] - 1)
    runs = torch.segment_reduce(tokens, pooling, lengths=lengths, axis=0, unsafe=True)
    pooled: Tensor = runs.masked_fill_((lengths == 0)[:, None, None], 0.0)[::2].unflatten(0, shape)
    return pooled.transpose(1, 2)
