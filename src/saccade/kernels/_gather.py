"""Chosen tokens of every row, and queries that share a KV head, for any layout and device; for the references."""

import torch
from torch import Tensor

from saccade.types import Rows


def locate(rows: Rows, positions: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Storage page and offset of logical positions `[B, N]`.

    Positions are first clamped into the row: what is read for an invalid one is a real token of the same row, so a
    later mask never meets the NaN that unused slots may hold.
    """
    slots = torch.minimum(positions, rows.seq_lens[:, None] - 1).clamp(min=0).long() + rows.row_start[:, None].long()
    return rows.page_table.long().gather(1, slots // page), slots % page


def gather_tokens(
    storage: Tensor, scale: Tensor | None, rows: Rows, positions: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Keys or values `[B, N, Hkv, d]` at logical positions `[B, N]`, the same for all heads."""
    tokens = storage[locate(rows, positions, storage.shape[1])].to(dtype)
    return tokens if scale is None else tokens * scale.expand(storage.shape[2])[:, None]


def gather_tokens_per_head(storage: Tensor, scale: Tensor | None, rows: Rows, positions: Tensor) -> Tensor:
    """Float32 keys or values `[B, H, N, d]` at logical positions `[B, H, N]`, H a multiple of Hkv."""
    batch, heads, count = positions.shape
    pages, offsets = locate(rows, positions.reshape(batch, heads * count), storage.shape[1])
    kv_heads = storage.shape[2]
    head = torch.arange(heads, device=storage.device) // (heads // kv_heads)
    chosen = storage[pages.view(positions.shape), offsets.view(positions.shape), head[None, :, None]].float()
    return chosen if scale is None else chosen * scale.expand(kv_heads)[head][:, None, None]


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Queries `[B, Hq, d]` by the KV head that they read, float32 `[B, Hkv, g, d]`."""
    batch, heads, head_dim = q.shape
    return q.float().reshape(batch, kv_heads, heads // kv_heads, head_dim)
