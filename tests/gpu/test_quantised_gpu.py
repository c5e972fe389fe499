"""Caches of 8-bit floats on a CUDA device as vLLM has them: in blocks, with one factor for a layer."""

from typing import get_args

import pytest
import torch
from device_caches import blocks_of, captured, check_everything
from kernel_caches import LAYOUTS, int32, make_case, moved
from quantised import FP8, quantised

from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.types import KVView, Pooling, Rows, Softmax


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("query", [torch.bfloat16, torch.float16])
def test_every_layout_against_loops(layout: str, query: torch.dtype) -> None:
    """Factors that are no powers of two, of odd rows; `expand` has given all heads the same memory."""
    plain = make_case(layout=layout, lengths=[131, 1, 65], kv_heads=2, group=3, head_dim=64, padding=7, loose=5)
    case = moved(quantised(plain, torch.tensor(0.013).expand(2), torch.tensor(3.7).expand(2), query))
    for pooling, unit, sets in zip(get_args(Pooling), (1, 16, 24), ("kv", "query", "all"), strict=True):
        check_everything(case, pooling, unit, sets)


def test_a_graph_reads_the_scales_that_it_finds() -> None:
    """What a captured step was given are places: a factor that is written later counts."""
    lengths, kv_heads, head_dim = [701, 65], 4, 128
    cache, table = blocks_of(lengths, 16, kv_heads, head_dim, FP8)
    k, v = (part.transpose(1, 2) for part in cache.split(head_dim, dim=-1))
    seq_lens = int32(lengths, "cuda")
    rows = Rows(table.cuda(), torch.zeros_like(seq_lens), seq_lens, 702)
    k_scale, v_scale = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    kv = KVView(k, v, rows, k_scale.expand(kv_heads), v_scale.expand(kv_heads))
    q = torch.randn(2, 16, head_dim, device="cuda").bfloat16()

    def step() -> torch.Tensor:
        return dense_decode_scores(q, kv, Softmax(head_dim**-0.5), implementation="triton")[0]

    before = step()
    graph, replayed = captured(step)
    k_scale.fill_(0.3)
    v_scale.fill_(0.013)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed, step())
    assert not torch.equal(replayed, before)
