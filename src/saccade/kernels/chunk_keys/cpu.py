"""Chunk keys on CPU: a row's keys are read where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from saccade.kernels._flat import RowReader, host_bounds
from saccade.kernels._pooling import RunPooling, pool_runs
from saccade.types import KVView


def pool(kv: KVView, row: int, edges: Sequence[int], poolings: Sequence[RunPooling]) -> list[Tensor]:
    """Pooled keys float32 `[Hkv, C, d]`, one for each pooling."""
    start, count = host_bounds(kv.rows)[row][0] + edges[0], edges[-1] - edges[0]
    tokens = RowReader(kv.k, kv.rows, row, start, count).read_heads(0, count).transpose(0, 1)
    tokens = tokens.float().contiguous()
    return [pool_runs(tokens, edges, pooling).transpose(0, 1) for pooling in poolings]
