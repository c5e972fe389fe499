"""Comparing results with the oracles, within the error budgets; and the choices that every operation's test draws."""

from __future__ import annotations

import math
from typing import get_args

import torch
from hypothesis import strategies as st
from kernel_budgets import attention_error, largest_query, score_error
from kernel_caches import Case
from torch import Tensor

import oracles
from saccade.kernels._native.attention import native_refusal
from saccade.kernels._native.library import library
from saccade.types import Pooling

implementations = st.sampled_from(("reference", "cpu"))
# test_native.py asserts that the library is there wherever it can be built.
fast_attention = ("cpu",) if library() is None else ("cpu", "native")
attention_implementations = st.sampled_from(("reference", *fast_attention))
poolings = st.sampled_from(get_args(Pooling))


def takes(implementation: str, case: Case) -> bool:
    """Whether the implementation is meant to take this cache."""
    if implementation == "native":
        return native_refusal(case.q, case.kv) is None
    return implementation == "reference" or case.layout not in ("columns", "strided")


def expect_scores(scores: Tensor, case: Case, pooling: Pooling) -> None:
    group = case.q.shape[1] // case.kv.kv_heads
    heads = case.q.shape[1] if pooling == "each" else case.kv.kv_heads
    assert scores.dtype == torch.float32
    assert scores.shape == (len(case.lengths), heads, case.kv.rows.max_len)
    for row, length in enumerate(case.lengths):
        queries, keys = case.queries[row], case.keys[row]
        for index, expected in enumerate(oracles.raw_scores(queries, keys, pooling)):
            head = index // group if pooling == "each" else index
            bound = largest_query(queries[head * group : (head + 1) * group])
            for position, (got, want) in enumerate(zip(scores[row, index].tolist(), expected, strict=False)):
                assert abs(got - want) <= score_error(bound, keys[head][position], group)
            assert all(score == -math.inf for score in scores[row, index, length:].tolist())


def expect_attention(out: Tensor, case: Case, chosen: list[list[list[int]]], scale: float) -> None:
    """`chosen[row][query head]` are the positions attended to."""
    group = case.q.shape[1] // case.kv.kv_heads
    assert out.dtype == case.q.dtype
    assert out.shape == case.q.shape
    for row, sets in enumerate(chosen):
        queries, keys, values = case.queries[row], case.keys[row], case.values[row]
        wanted = oracles.attention(queries, keys, values, sets, scale)
        for head, expected in enumerate(wanted):
            kv_head = head // group
            bounds = attention_error(queries[head], keys[kv_head], values[kv_head], sets[head], scale, case.q.dtype)
            for got, want, bound in zip(out[row, head].tolist(), expected, bounds, strict=True):
                assert abs(got - want) <= bound


def everything(case: Case) -> list[list[list[int]]]:
    return [[list(range(length))] * case.q.shape[1] for length in case.lengths]
