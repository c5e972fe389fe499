"""Values of another width than keys, which torch's kernels take; that all others refuse is in `test_refusals`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kernel_checks import refused

import oracles
from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import KVView, Rows, Selection, Softmax

KEYS, SCALE = 16, 0.25
STARTS, LENGTHS = [0, 3], [9, 6]
CHOSEN = [[[0, 4, 8], [1, 2, 8]], [[0, 3, 5], [2, 4, 5]]]
DENSE = (True, False)


def case(width: int) -> tuple[torch.Tensor, KVView, Selection]:
    """Two rows, the second padded, four query heads on two KV heads; what lies outside of a row is NaN."""
    generator = torch.Generator().manual_seed(width)
    k, v = (torch.randn(2, 9, 2, size, generator=generator) for size in (KEYS, width))
    k[1, :3] = v[1, :3] = float("nan")
    rows = Rows.on_host(torch.arange(2, dtype=torch.int32)[:, None], STARTS, LENGTHS)
    ids = torch.tensor(CHOSEN, dtype=torch.int32)
    selection = Selection(ids, torch.full((2, 2), 3, dtype=torch.int32))
    return torch.randn(2, 4, KEYS, generator=generator), KVView(k, v, rows), selection


def expected(q: torch.Tensor, kv: KVView, dense: Sequence[bool]) -> torch.Tensor:
    """Loops in float64; of each KV head all tokens or those chosen."""
    outputs = []
    for row, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        keys, values = (held[row, start:].transpose(0, 1).double().tolist() for held in (kv.k, kv.v))
        sets = [list(range(length)) if dense[head // 2] else CHOSEN[row][head // 2] for head in range(4)]
        outputs.append(oracles.attention(q[row].double().tolist(), keys, values, sets, SCALE))
    return torch.tensor(outputs, dtype=torch.float64)


@pytest.mark.parametrize("width", [8, 12, 24])
def test_outputs_are_as_wide_as_values(width: int) -> None:
    q, kv, selection = case(width)
    out = torch.empty(2, 4, width)
    found = {
        (True, True): dense_decode_scores(q, kv, Softmax(SCALE), out=out)[0],
        (False, False): sparse_decode(q, kv, selection, Softmax(SCALE)),
        DENSE: hybrid_decode(q, kv, selection, DENSE, Softmax(SCALE), pooling="max")[0],
    }
    assert found[True, True] is out
    for dense, output in found.items():
        # A dozen products of numbers around 1 in float32.
        torch.testing.assert_close(output.double(), expected(q, kv, dense), rtol=0, atol=2.0**-18)


def test_an_output_as_wide_as_keys_is_refused() -> None:
    q, kv, selection = case(8)
    words = r"out must be contiguous torch.float32 \[2, 4, 8\], got .* \[2, 4, 16\]"
    refused(words, sparse_decode, q, kv, selection, Softmax(SCALE), out=torch.empty(2, 4, KEYS))
