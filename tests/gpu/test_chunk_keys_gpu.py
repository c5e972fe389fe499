"""Chunk keys on a CUDA device: bfloat16 against the budgets of float32, no host synchronisation."""

import pytest
import torch
from kernel_caches import make_case, moved, moved_cache
from test_chunk_keys import expect, table

from saccade.kernels.chunk_keys.api import chunk_keys


@pytest.mark.parametrize("layout", ["buffer", "paged", "interleaved", "strided"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_against_float64(layout: str, head_dim: int) -> None:
    sizes = {"lengths": [300, 129], "kv_heads": 2, "group": 1, "head_dim": head_dim, "padding": 7}
    case = moved(make_case(layout=layout, **sizes, dtype=torch.bfloat16))
    for edges in ([[0, 1, 17, 17, 33, 260, 300], [5, 6, 129]], [[], [0, 0, 129]]):
        for pooling in ("mean", "max"):
            expect(case, edges, pooling, "auto")


def test_no_host_synchronisation() -> None:
    kv = moved_cache(make_case(layout="paged", lengths=[300, 20], kv_heads=2, group=1, head_dim=64, padding=1).kv)
    edges = table([[1, 9, 9, 200], []], "cuda")
    wanted = chunk_keys((kv,), edges, longest=191)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = chunk_keys((kv,), edges, longest=191)
        chunk_keys((kv,), edges, longest=191, pooling="max")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.equal(wanted)
