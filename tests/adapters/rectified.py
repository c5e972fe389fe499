"""Policies at their smallest budgets under rectification, and the model that nothing was attached to."""

from __future__ import annotations

import functools

import torch
from transformers import PreTrainedModel

from . import tiny

EVERY = 3
NEW = 14
SMALLEST = {
    "streaming": "streaming:budget=5",
    "quest": "quest:page=4,budget=4",
    "tidal": "tidal:reselect=3,dense_layers=1,budget=1",
    "less_is_more": "less_is_more:reselect=3,dense_layers=1,budget=6",
    "exact_topk": "exact_topk:dense_layers=1,budget=1",
    "resa": "resa:page=4,min_pages=1,ratio=0.01",
    "lychee_decode": "lychee_decode:roles=every:2,budget=1",
    "lychee_cluster": "lychee_cluster:sinks=2,chunk_min=2,chunk_max=4,dense_layers=1,budget={cluster}",
}
"""Every policy at its smallest legal budget; `cluster`: sinks, a buffer of 1, a chunk, and what may be in none."""


def specs(every: int, mode: str = "overwrite") -> dict[str, str]:
    suffix = f",rectify={every}" + ("" if mode == "overwrite" else f":{mode}")
    return {name: spec.format(cluster=2 + 1 + 4 + every + 3) + suffix for name, spec in SMALLEST.items()}


@functools.cache
def twin() -> PreTrainedModel:
    """The same weights, never attached."""
    return tiny.fresh("llama")


@functools.cache
def exact_twin() -> PreTrainedModel:
    """The same in float64."""
    return tiny.fresh("llama").double()


Numbers = tuple[tuple[int, ...], ...]


def numbers(rows: torch.Tensor) -> Numbers:
    """Rows by which what was computed of them is found again."""
    return tuple(map(tuple, rows.tolist()))
