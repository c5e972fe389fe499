"""Dense attention of the last tokens of every row in every implementation, against float64 loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_caches import Case, cases, make_case, with_sinks
from kernel_checks import expect_attention, only, refused, seeds
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_pass.api import dense_pass
from saccade.types import KVView

counts = st.sampled_from((1, 2, 5, 33))


def queries_of(case: Case, count: int, seed: int) -> Tensor:
    """`[B, Hq, n, d]`."""
    batch, heads, head_dim = case.q.shape
    random = torch.Generator().manual_seed(seed)
    return torch.randn((batch, heads, count, head_dim), generator=random).to(case.q.dtype).to(case.q.device)


def expect_pass(case: Case, q: Tensor, implementation: Implementation = "auto") -> Tensor:
    """Each place against the oracle over what lies up to it; a place before the row's first token gives 0."""
    out = dense_pass(q, case.kv, case.softmax, implementation=implementation)
    batch, heads, count, head_dim = q.shape
    assert out.shape == (batch, count, heads, head_dim)
    for place in range(count):
        ends = [length - count + place + 1 for length in case.lengths]
        present = [row for row, end in enumerate(ends) if end > 0]
        kept = only(replace(case, lengths=ends, q=q[:, :, place]), present)
        expect_attention(out[present, place], kept, [[list(range(ends[row]))] * heads for row in present])
        assert bool((out[[row for row, end in enumerate(ends) if end <= 0], place] == 0).all())
    return out


@pytest.mark.parametrize("implementation", ["reference", "cpu", "auto"])
@given(cases(), counts, seeds)
def test_dense_pass_matches_the_oracle(implementation: Implementation, case: Case, count: int, seed: int) -> None:
    if implementation == "cpu":
        assume(case.layout == "buffer")
        case = replace(case, softmax=replace(case.softmax, sinks=None, cap=None))
    expect_pass(case, queries_of(case, count, seed), implementation)


def test_an_explicit_implementation_never_falls_back() -> None:
    paged, plain = make_case(layout="paged", lengths=[40], head_dim=8), make_case(lengths=[40], head_dim=8)
    q, kv, softmax = queries_of(plain, 3, 0), plain.kv, plain.softmax
    refused(r"cannot take this call: rows have \d+ pages", dense_pass, q, paged.kv, softmax, implementation="cpu")
    refused("sinks", dense_pass, q, kv, with_sinks(plain, 0.0).softmax, implementation="cpu")
    refused("quantised", dense_pass, q, replace(kv, k_scale=torch.ones(2)), softmax, implementation="cpu")
    refused("q is torch", dense_pass, q.bfloat16(), kv, softmax, implementation="cpu")
    refused("unknown implementation", dense_pass, q, kv, softmax, implementation="native")


def test_a_quantised_cache_is_scaled() -> None:
    """Powers of two scale exactly."""
    case = make_case(lengths=[19, 5], head_dim=8)
    scaled = replace(case.kv, k_scale=torch.tensor([0.5, 2.0]), v_scale=torch.tensor(4.0))
    factors = torch.tensor([0.5, 2.0])[:, None]
    plain = KVView(case.kv.k * factors, case.kv.v * 4.0, case.kv.rows)
    q = queries_of(case, 4, 0)
    assert torch.equal(
        dense_pass(q, scaled, case.softmax, implementation="reference"),
        dense_pass(q, plain, case.softmax, implementation="reference"),
    )


def test_arguments_that_do_not_fit_are_named() -> None:
    case = make_case(lengths=[9], head_dim=8)
    for q, words in (
        (case.q, r"\[B, Hq, n, d\]"),
        (case.q[:, :, None][:, :, :0], r"\[B, Hq, n, d\]"),
        (case.q[:, :3, None], "multiple"),
    ):
        refused(words, dense_pass, q, case.kv, case.softmax)
