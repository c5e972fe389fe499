"""Chunk keys on CPU: a row's keys are read where they lie."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.kernels._flat import RowReader, host_bounds
from saccade.kernels._pooling import BLOCK, RunPooling, pool_runs
from saccade.types import KVView


def pool(kv: KVView, edges: Tensor, poolings: Sequence[RunPooling]) -> list[Tensor]:
    """Pooled keys float32 `[B, Hkv, C, d]`, one for each pooling."""
    shape = (edges.shape[0], kv.kv_heads, edges.shape[1] - 1, kv.head_dim)
    pooled = [torch.zeros(shape, dtype=torch.float32) for _ in poolings]
    for row, (slot, _) in enumerate(host_bounds(kv.rows)):
        places = edges[row].tolist()
        lengths = edges[row].diff()
        first = 0
        while places[first] < places[-1]:
            # As many chunks as a block holds, and one in any case.
            last = max(bisect_right(places, places[first] + BLOCK) - 1, first + 1)
            count = places[last] - places[first]
            if count:
                reader = RowReader(kv.k, kv.rows, row, slot + places[first], count)
                tokens = reader.read_heads(0, count).transpose(0, 1).float().contiguous()
                for target, pooling in zip(pooled, poolings, strict=True):
                    runs = pool_runs(tokens, lengths[first:last], pooling)
                    target[row, :, first:last] = runs.transpose(0, 1)
            first = last
    return pooled
