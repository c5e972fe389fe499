"""Dense attention of the last tokens of every row against float64 loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_caches import Case, cases, make_case, with_sinks
from kernel_checks import expect_attention
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_pass.api import dense_pass
from saccade.types import KVView

counts = st.sampled_from((1, 2, 5, 33))


def queries_of(case: Case, count: int, seed: int) -> Tensor:
    """`[B, Hq, n, d]`."""
    batch, heads, head_dim = case.q.shape
    random = torch.Generator().manual_seed(seed)
    return torch.randn((batch, heads, count, head_dim), generator=random).to(case.q.dtype).to(case.q.device)


def expect_pass(out: Tensor, case: Case, q: Tensor) -> None:
    """Each place against the oracle over what lies up to it; a place before the row's first token gives 0."""
    batch, heads, count, head_dim = q.shape
    assert out.shape == (batch, count, heads, head_dim)
    for place in range(count):
        ends = [length - count + place + 1 for length in case.lengths]
        present = [row for row, end in enumerate(ends) if end > 0]
        kept = replace(
            case,
            lengths=[ends[row] for row in present],
            q=q[present, :, place],
            keys=[case.keys[row] for row in present],
            values=[case.values[row] for row in present],
        )
        expect_attention(out[present, place], kept, [[list(range(ends[row]))] * heads for row in present])
        assert bool((out[[row for row, end in enumerate(ends) if end <= 0], place] == 0).all())


def takes(implementation: str, case: Case) -> bool:
    """Whether the implementation is meant to take this cache."""
    known = case.softmax.sinks is None and case.softmax.cap is None
    return implementation == "reference" or (case.layout == "buffer" and known)


@given(cases(), st.sampled_from(("reference", "cpu", "auto")), counts, st.integers(0, 2**31))
def test_dense_pass_matches_the_oracle(case: Case, implementation: Implementation, count: int, seed: int) -> None:
    assume(takes(implementation, case))
    q = queries_of(case, count, seed)
    expect_pass(dense_pass(q, case.kv, case.softmax, implementation=implementation), case, q)


def test_one_token_is_a_decoding_step() -> None:
    """The same query in every place sees one token more in each."""
    case = make_case(layout="buffer", lengths=[20], kv_heads=1, group=2, head_dim=8)
    q = case.q[:, :, None].expand(-1, -1, 3, -1).contiguous()
    out = dense_pass(q, case.kv, case.softmax)
    assert not torch.equal(out[:, 0], out[:, 1])
    expect_pass(out, case, q)


def test_an_explicit_implementation_never_falls_back() -> None:
    case = make_case(layout="paged", lengths=[40], kv_heads=2, group=2, head_dim=8)
    q = queries_of(case, 3, 0)
    with pytest.raises(KernelError, match=r"cannot take this call: rows have \d+ pages"):
        dense_pass(q, case.kv, case.softmax, implementation="cpu")
    plain = make_case(layout="buffer", lengths=[40], kv_heads=2, group=2, head_dim=8)
    with pytest.raises(KernelError, match="sinks"):
        dense_pass(q, plain.kv, with_sinks(plain, 0.0).softmax, implementation="cpu")
    scaled = replace(plain.kv, k_scale=torch.ones(2))
    with pytest.raises(KernelError, match="quantised"):
        dense_pass(q, scaled, plain.softmax, implementation="cpu")
    with pytest.raises(KernelError, match="q is torch"):
        dense_pass(q.bfloat16(), plain.kv, plain.softmax, implementation="cpu")
    with pytest.raises(KernelError, match="unknown implementation"):
        dense_pass(q, plain.kv, plain.softmax, implementation="native")


def test_a_quantised_cache_is_scaled() -> None:
    """Powers of two scale exactly."""
    case = make_case(layout="buffer", lengths=[19, 5], kv_heads=2, group=2, head_dim=8)
    scaled = replace(case.kv, k_scale=torch.tensor([0.5, 2.0]), v_scale=torch.tensor(4.0))
    factors = torch.tensor([0.5, 2.0])[:, None]
    plain = KVView(case.kv.k * factors, case.kv.v * 4.0, case.kv.rows)
    q = queries_of(case, 4, 0)
    assert torch.equal(
        dense_pass(q, scaled, case.softmax, implementation="reference"),
        dense_pass(q, plain, case.softmax, implementation="reference"),
    )


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(layout="buffer", lengths=[9], kv_heads=2, group=2, head_dim=8)
    with pytest.raises(KernelError, match=r"\[B, Hq, n, d\]"):
        dense_pass(case.q, case.kv, case.softmax)
    with pytest.raises(KernelError, match=r"\[B, Hq, n, d\]"):
        dense_pass(case.q[:, :, None][:, :, :0], case.kv, case.softmax)
    with pytest.raises(KernelError, match="multiple"):
        dense_pass(case.q[:, :3, None], case.kv, case.softmax)
