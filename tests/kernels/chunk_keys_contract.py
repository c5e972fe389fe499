"""What every implementation of chunk keys gives: means and maxima of the chunks' own slots alone."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from kernel_budgets import gamma
from kernel_caches import Case, int32
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels.chunk_keys import api
from saccade.kernels.chunk_keys.api import ChunkPooling
from saccade.types import KVView


def table(edges: list[list[int]], device: str = "cpu") -> Tensor:
    """Edges of all rows; a row of fewer chunks repeats its last edge, one of none has some that no row has."""
    width = max(2, *map(len, edges))
    rows = [row or [10**6] for row in edges]
    return int32([row + row[-1:] * (width - len(row)) for row in rows], device)


def chunk_keys(kv: KVView, edges: Tensor, **options: Any) -> Tensor:
    return api.chunk_keys((kv,), edges, **options)[0]


def longest_of(edges: list[list[int]]) -> int:
    return max((stop - start for row in edges for start, stop in pairwise(row)), default=1)


def expect(case: Case, edges: list[list[int]], pooling: ChunkPooling, implementation: Implementation) -> None:
    """A mean of n numbers errs by gamma(n + 1) of their magnitude, the length by gamma(d + 2), the quotient by 1 more.

    So a component of the unit vector errs by that share of the mean magnitudes over the pooled vector's length; and
    the length itself by the same of all components.
    """
    places = table(edges, str(case.kv.k.device))
    options = {"longest": max(longest_of(edges), 1), "implementation": implementation}
    keys = chunk_keys(case.kv, places, pooling=pooling, **options)
    assert keys.dtype == torch.float32
    assert keys.shape == (len(edges), case.kv.kv_heads, places.shape[1] - 1, case.kv.head_dim)
    for row, head, number, start, stop in chunks(case, places):
        got = keys[row, head, number].double().cpu().numpy()
        own = case.keys[row][head][start:stop] if stop > start else np.zeros((1, case.kv.head_dim))
        pooled = own.max(0) if pooling == "max" else own.mean(0)
        sizes = np.abs(own).mean(0) if pooling == "mean" else np.abs(pooled)
        length = math.sqrt((pooled * pooled).sum())
        if length == 0:
            assert got.tolist() == pooled.tolist()
            continue
        relative = gamma(stop - start + case.kv.head_dim + 5)
        largest = math.sqrt((sizes * sizes).sum()) / length
        allowed = relative * (sizes / length + np.abs(pooled) / length * largest) + 1e-30
        assert (np.abs(got - pooled / length) <= allowed).all()


def chunks(case: Case, places: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """Row, head, number, start and stop of every chunk."""
    for row, edges in enumerate(places.tolist()):
        for head in range(case.kv.kv_heads):
            for number, (start, stop) in enumerate(pairwise(edges)):
                yield row, head, number, start, stop
