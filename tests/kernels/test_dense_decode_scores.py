"""Dense decoding attention and its scores against float64 loops."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_caches import LAYOUTS, Case, cases, make_case
from kernel_checks import attention_implementations, expect_dense, expect_scores, fast_attention, poolings, takes

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.types import KVView, Pooling, Rows, Softmax


@given(cases(), attention_implementations, st.one_of(st.none(), poolings), st.sampled_from((0.125, 0.3)))
def test_dense_decode_scores_matches_the_oracle(
    case: Case, implementation: Implementation, pooling: Pooling | None, scale: float
) -> None:
    assume(takes(implementation, case))
    expect_dense(replace(case, softmax=replace(case.softmax, scale=scale)), pooling, implementation)


@given(cases(), attention_implementations, poolings)
def test_decode_scores_matches_the_oracle(case: Case, implementation: Implementation, pooling: Pooling) -> None:
    assume(takes(implementation, case))
    expect_scores(decode_scores(case.q, case.kv, pooling=pooling, implementation=implementation), case, pooling)


@pytest.mark.parametrize("implementation", fast_attention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["buffer", "paged"])
def test_rows_of_several_blocks(layout: str, dtype: torch.dtype, implementation: Implementation) -> None:
    """Longer than every block of the CPU paths, with a ragged end."""
    case = make_case(layout=layout, lengths=[17000, 4103], kv_heads=1, group=2, head_dim=16, dtype=dtype, padding=7)
    expect_dense(case, "max", implementation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_takes_every_layout(layout: str) -> None:
    case = make_case(layout=layout, lengths=[9, 4], kv_heads=2, group=3, head_dim=8)
    expect_dense(case, None, "auto")


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("length", [9, 20000])
@pytest.mark.parametrize("implementation", fast_attention)
def test_results_outlive_the_next_call(pooling: Pooling, length: int, implementation: Implementation) -> None:
    """The CPU path keeps its working memory; nothing it returns may lie there."""
    case = make_case(layout="buffer", lengths=[length], kv_heads=1, group=2, head_dim=16)
    results = (
        *dense_decode_scores(case.q, case.kv, case.softmax, pooling=pooling, implementation=implementation),
        decode_scores(case.q, case.kv, pooling=pooling, implementation=implementation),
    )
    before = [result.clone() for result in results if result is not None]
    other = replace(case.kv, k=case.kv.k + 1.0, v=case.kv.v + 1.0)
    dense_decode_scores(case.q, other, Softmax(0.3), pooling=pooling, implementation=implementation)
    decode_scores(case.q, other, pooling=pooling, implementation=implementation)
    assert len(before) == 3
    assert all(torch.equal(result, copy) for result, copy in zip(results, before, strict=True) if result is not None)


def test_an_explicit_implementation_never_falls_back() -> None:
    case = make_case(layout="strided", lengths=[9], kv_heads=2, group=2, head_dim=8)
    with pytest.raises(KernelError, match="strides"):
        dense_decode_scores(case.q, case.kv, case.softmax, implementation="cpu")
    with pytest.raises(KernelError, match="strides"):
        decode_scores(case.q, case.kv, pooling="max", implementation="cpu")
    with pytest.raises(KernelError, match="unknown implementation"):
        decode_scores(case.q, case.kv, pooling="max", implementation="fast")  # type: ignore[arg-type]


def test_a_quantised_cache_is_scaled_by_the_reference() -> None:
    case = make_case(layout="buffer", lengths=[9, 5], kv_heads=2, group=2, head_dim=8)
    scaled = replace(case.kv, k_scale=torch.tensor([0.5, 2.0]), v_scale=torch.tensor(4.0))
    with pytest.raises(KernelError, match="quantised"):
        dense_decode_scores(case.q, scaled, Softmax(0.3), implementation="cpu")
    factors = torch.tensor([0.5, 2.0])[:, None]
    plain = replace(case.kv, k=case.kv.k * factors, v=case.kv.v * 4.0)
    out, scores = dense_decode_scores(case.q, scaled, Softmax(0.3), pooling="each")
    # Powers of two scale exactly, so that both orders of multiplication round alike.
    wanted, wanted_scores = dense_decode_scores(case.q, plain, Softmax(0.3), pooling="each", implementation="reference")
    assert torch.equal(out, wanted)
    assert scores is not None
    assert wanted_scores is not None
    assert torch.equal(scores, wanted_scores)


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=8)
    with pytest.raises(KernelError, match="multiple"):
        dense_decode_scores(case.q[:, :3], case.kv, case.softmax)
    with pytest.raises(KernelError, match="head dim"):
        dense_decode_scores(case.q[..., :4], case.kv, case.softmax)
    with pytest.raises(KernelError, match=r"\[B, Hq, d\]"):
        dense_decode_scores(case.q[0], case.kv, case.softmax)
    with pytest.raises(KernelError, match="pooling"):
        decode_scores(case.q, case.kv, pooling="sum")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="floating"):
        dense_decode_scores(case.q.int(), case.kv, case.softmax)
    with pytest.raises(KernelError, match=r"sinks must be contiguous \[4\] on cpu, got \[2\] on cpu"):
        dense_decode_scores(case.q, case.kv, Softmax(0.3, torch.zeros(2)))
    with pytest.raises(KernelError, match="cap must be more than 0 and finite, got -1"):
        dense_decode_scores(case.q, case.kv, Softmax(0.3, cap=-1.0))


def test_working_memory_serves_inside_and_outside_inference_mode() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    # Longer than what any test before has left behind, so that the first call makes the memory.
    k = torch.randn(1, 9000, 1, 8, dtype=torch.float16)
    kv = KVView(k, k, Rows.on_host(table, [0], [8990], max_len=9000))
    q = torch.randn(1, 1, 8, dtype=torch.float16)
    with torch.inference_mode():
        inside, _ = dense_decode_scores(q, kv, Softmax(0.3), pooling="each", implementation="cpu")
    outside, _ = dense_decode_scores(q, kv, Softmax(0.3), pooling="each", implementation="cpu")
    assert torch.equal(inside, outside)
