"""Chunk keys in plain torch, for any device and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saccade.kernels._gather import gather_tokens
from saccade.kernels._pooling import RunPooling, pool_runs
from saccade.types import KVView


def pool(kv: KVView, row: int, edges: Sequence[int], poolings: Sequence[RunPooling]) -> list[Tensor]:
    """Pooled keys float32 `[Hkv, C, d]`, one for each pooling."""
    one, rows = slice(row, row + 1), kv.rows
    alone = replace(
        rows, page_table=rows.page_table[one], row_start=rows.row_start[one], seq_lens=rows.seq_lens[one], bounds=None
    )
    positions = torch.arange(edges[0], edges[-1], device=kv.k.device)[None]
    tokens = gather_tokens(kv.k, kv.k_scale, alone, positions)[0]
    return [pool_runs(tokens, edges, pooling).transpose(0, 1) for pooling in poolings]
