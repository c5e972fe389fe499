"""Triton's decoding attention on a CUDA device: bfloat16 and float8 against float64, long rows, graphs."""

from typing import get_args

import pytest
import torch
from device_caches import (
    DIM,
    DTYPES,
    GROUP,
    KV_HEADS,
    SCALE,
    captured,
    check_everything,
    expect_close,
    expect_long_scores,
    long_cache,
    marked,
    random_sets,
)
from kernel_caches import LAYOUTS, int32, make_case, moved, with_cap, with_sinks
from quantised import quantised
from torch import Tensor

from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import KVView, Pooling, Rows, Selection, Softmax, Workspace


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_against_loops(layout: str, dtype: torch.dtype) -> None:
    sizes = {"lengths": [131, 1, 64], "group": 3, "head_dim": 64, "padding": 7, "loose": 5}
    case = moved(make_case(layout=layout, **sizes, dtype=dtype))
    for pooling, unit, sets in zip(get_args(Pooling), (1, 16, 24), ("kv", "query", "all"), strict=True):
        check_everything(case, pooling, unit, sets)


@pytest.mark.parametrize("around", [0.0, 3.0, -200.0, 200.0])
@pytest.mark.parametrize("lengths", [[131, 1, 64], [4000, 77]], ids=["one part", "several parts"])
def test_sinks_against_loops(lengths: list[int], around: float) -> None:
    case = make_case(layout="paged", lengths=lengths, kv_heads=2, group=3, head_dim=64, dtype=torch.bfloat16)
    check_everything(moved(with_sinks(case, around)), "max", 1, "kv")


@pytest.mark.parametrize("cap", [0.125, 2.0, 50.0])
@pytest.mark.parametrize("lengths", [[131, 1, 64], [4000, 77]], ids=["one part", "several parts"])
def test_soft_caps_against_loops(lengths: list[int], cap: float) -> None:
    case = make_case(layout="paged", lengths=lengths, kv_heads=2, group=3, head_dim=64, dtype=torch.bfloat16)
    check_everything(moved(with_cap(with_sinks(case, 0.0), cap)), "max", 1, "kv")


@pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (4, 128), (7, 80), (8, 96), (17, 64), (32, 16), (4, 256)])
def test_shapes_of_heads_against_loops(group: int, head_dim: int) -> None:
    sizes = {"lengths": [150, 77], "kv_heads": 2, "group": group, "head_dim": head_dim, "padding": 7}
    check_everything(moved(make_case(layout="paged", **sizes, dtype=torch.bfloat16)), "max", 1, "kv")


@pytest.mark.parametrize("style", ["clustered", "constant", "peaked"])
def test_logits_that_are_alike_or_far_apart(style: str) -> None:
    case = moved(
        make_case(layout="buffer", lengths=[300], kv_heads=2, group=4, head_dim=64, dtype=torch.bfloat16, style=style)
    )
    check_everything(case, "max", 1, "query")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("query", DTYPES)
def test_a_quantised_cache_is_scaled(dtype: torch.dtype, query: torch.dtype) -> None:
    """Powers of two scale exactly: the loops read the scaled numbers."""
    plain = make_case(layout="buffer", lengths=[150, 9], kv_heads=2, group=4, head_dim=64, padding=7)
    case = moved(quantised(plain, torch.tensor([0.5, 2.0]), torch.tensor([4.0, 0.25]), query, dtype))
    check_everything(case, "max", 1, "kv")
    check_everything(case, "each", 16, "all")


@pytest.mark.parametrize("page", [None, 16, 128])
def test_long_rows(page: int | None) -> None:
    lengths, max_len = [40_000, 17, 33_333], 40_960
    kv, k, v = long_cache(lengths, page, max_len, 0)
    q = torch.randn((3, KV_HEADS * GROUP, DIM), device="cuda").bfloat16()
    out, scores = dense_decode_scores(q, kv, Softmax(SCALE), pooling="max", implementation="triton")
    assert scores is not None
    expect_close(out, q, k, v, marked(lengths, max_len))
    expect_long_scores(scores, q, k, lengths)
    for unit in (1, 16):
        selection, chosen = random_sets(lengths, 4096, unit, 1, max_len)
        expect_close(sparse_decode(q, kv, selection, Softmax(SCALE), implementation="triton"), q, k, v, chosen)
        dense = (True, False, False, True)
        out, scores = hybrid_decode(q, kv, selection, dense, Softmax(SCALE), pooling="max", implementation="triton")
        assert scores is not None
        flags = torch.tensor(dense, device="cuda")[None, :, None]
        expect_close(out, q, k, v, torch.where(flags, marked(lengths, max_len), chosen))


def test_offsets_beyond_32_bits() -> None:
    """A storage of more than 2^31 numbers, of which the last ones count."""
    max_len = 2**31 // (KV_HEADS * DIM) + 4096
    k = torch.zeros((1, max_len, KV_HEADS, DIM), dtype=torch.bfloat16, device="cuda")
    k[:, -1, :, 0] = 8.0
    v = torch.zeros_like(k)
    v[:, -1] = 1.0
    zeros = int32([0], "cuda")
    kv = KVView(k, v, Rows(zeros[None], zeros, zeros + max_len, max_len))
    q = torch.zeros((1, KV_HEADS * GROUP, DIM), dtype=torch.bfloat16, device="cuda")
    q[..., 0] = 8.0
    selection = Selection(int32([[[0, max_len - 2, max_len - 1]]], "cuda"), int32([[3]], "cuda"))
    for out in (
        dense_decode_scores(q, kv, Softmax(1.0), implementation="triton")[0],
        sparse_decode(q, kv, selection, Softmax(1.0), implementation="triton"),
    ):
        assert bool((out == 1.0).all())


def test_a_graph_replays_with_other_lengths_and_sets() -> None:
    max_len = 8192
    kv, k, v = long_cache([max_len, max_len], None, max_len, 2)
    q = torch.randn((2, KV_HEADS * GROUP, DIM), device="cuda").bfloat16()
    selection, _ = random_sets([max_len, max_len], 1024, 1, 3, max_len)
    dense = (True, False, True, False)

    def step() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        all_tokens, scores = dense_decode_scores(q, kv, Softmax(SCALE), pooling="max", implementation="triton")
        assert scores is not None
        chosen = sparse_decode(q, kv, selection, Softmax(SCALE), implementation="triton")
        mixed, _ = hybrid_decode(q, kv, selection, dense, Softmax(SCALE), implementation="triton")
        return all_tokens, scores, chosen, mixed

    graph, results = captured(step)
    for seed, lengths in enumerate(([max_len, 1], [63, 64], [4097, 8000], [max_len, max_len])):
        kv.rows.seq_lens.copy_(torch.tensor(lengths))
        other, chosen = random_sets(lengths, 1024, 1, seed, max_len)
        selection.ids.copy_(other.ids)
        selection.counts.copy_(other.counts)
        q.normal_()
        graph.replay()
        all_tokens, scores, sparse, mixed = results
        everywhere = marked(lengths, max_len)
        expect_close(all_tokens, q, k, v, everywhere)
        expect_long_scores(scores, q, k, lengths)
        expect_close(sparse, q, k, v, chosen)
        flags = torch.tensor(dense, device="cuda")[None, :, None]
        expect_close(mixed, q, k, v, torch.where(flags, everywhere, chosen))


def test_auto_is_triton_and_repeats_itself_bit_for_bit() -> None:
    kv, _, _ = long_cache([5000, 70], 16, 5008, 4)
    q = torch.randn((2, KV_HEADS * GROUP, DIM), device="cuda").bfloat16()
    selection, _ = random_sets([5000, 70], 1024, 1, 5, 5008)
    asked = sparse_decode(q, kv, selection, Softmax(SCALE), implementation="triton")
    for _ in range(5):
        assert torch.equal(sparse_decode(q, kv, selection, Softmax(SCALE)), asked)
    asked, _ = dense_decode_scores(q, kv, Softmax(SCALE), implementation="triton")
    for _ in range(5):
        assert torch.equal(dense_decode_scores(q, kv, Softmax(SCALE))[0], asked)
    alone = decode_scores(q, kv, pooling="max")
    fused = dense_decode_scores(q, kv, Softmax(SCALE), pooling="max")[1]
    assert fused is not None
    for row, length in enumerate((5000, 70)):
        # A set must not depend on which of the two operations scored it; behind a row's end they are undefined.
        assert torch.equal(alone[row, :, :length], fused[row, :, :length])


def test_programs_that_join_the_parts_see_what_others_have_written() -> None:
    """Batches of several sizes in turn on the same memory to count in: the same bits every time, and zeros behind."""
    workspace = Workspace.of(8, KV_HEADS * GROUP, torch.device("cuda"))
    given = {"workspace": workspace, "implementation": "triton"}
    for seed, lengths in enumerate(([40_000], [20_000, 3, 9_000], [8_000] * 8, [40_000])):
        kv, k, v = long_cache(lengths, 16, max(lengths), seed)
        q = torch.randn((len(lengths), KV_HEADS * GROUP, DIM), device="cuda").bfloat16()
        selection, chosen = random_sets(lengths, 2048, 1, seed, max(lengths))
        first = sparse_decode(q, kv, selection, Softmax(SCALE), **given)
        expect_close(first, q, k, v, chosen)
        others = [sparse_decode(q, kv, selection, Softmax(SCALE), **given) for _ in range(100)]
        assert all(torch.equal(other, first) for other in others)
        assert not workspace.turns.any()
