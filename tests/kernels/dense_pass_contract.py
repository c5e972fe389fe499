"""What every implementation of dense attention of the last tokens gives: what float64 loops say."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from kernel_caches import Case
from kernel_checks import expect_attention
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_pass.api import dense_pass

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
        kept = replace(
            case,
            lengths=[ends[row] for row in present],
            q=q[present, :, place],
            keys=[case.keys[row] for row in present],
            values=[case.values[row] for row in present],
        )
        expect_attention(out[present, place], kept, [[list(range(ends[row]))] * heads for row in present])
        assert bool((out[[row for row, end in enumerate(ends) if end <= 0], place] == 0).all())
    return out
