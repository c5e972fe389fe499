"""Top-k and the union on a CUDA device: long rows, clusters and constants, and replayed with other lengths."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import test_topk
import torch
from kernel_caches import int32
from test_rank_union import expect_merged, ranked_of
from test_topk import DEVICE_STYLES as STYLES
from torch import Tensor

from saccade.kernels._share import Share
from saccade.kernels.rank_union.api import framed_rank_union, rank_union
from saccade.kernels.topk.api import Order, topk, topk_and_last
from saccade.selection.rules.rank_union import RankUnion
from saccade.types import Rows

ORDERS: tuple[Order, ...] = ("position", "score")
IMPLEMENTATIONS: tuple[Literal["triton", "reference"], ...] = ("triton", "reference")
# Of rows a hundred times as long.
make_scores = partial(test_topk.make_scores, device="cuda", wide=30)
device_lengths = partial(int32, device="cuda")


def expected(scores: Tensor, lengths: list[int], k: int, order: Order) -> Tensor:
    """A stable sort of each row on the CPU."""
    kept = min(k, scores.shape[2])
    ids = torch.full((*scores.shape[:2], kept), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        # Adding 0.0 makes -0.0 equal to 0.0 for any sort.
        best = (scores[row, :, :length].cpu() + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :kept]
        ids[row, :, : best.shape[1]] = best.sort(dim=-1).values if order == "position" else best
    return ids


def expect_topk(scores: Tensor, lengths: list[int], k: int, order: Order) -> None:
    ids, counts = topk(scores, device_lengths(lengths), k, order=order, implementation="triton")
    assert counts.tolist() == [[min(k, length)] * scores.shape[1] for length in lengths]
    assert torch.equal(ids.cpu(), expected(scores, lengths, k, order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("style", STYLES)
def test_long_rows(style: str, order: Order) -> None:
    scores = make_scores(style, (3, 2, 131_073), 1)
    expect_topk(scores, [131_073, 131_000, 77_777], 2048, order)
    expect_topk(scores[:, :, 5:], [4096, 4097, 1], 4096, order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("style", STYLES)
def test_short_rows(style: str, order: Order) -> None:
    scores = make_scores(style, (2, 3, 16_385), 2)
    for k in (1, 255, 256, 4096):
        expect_topk(scores, [16_385, 9_999], k, order)
    expect_topk(scores, [0, 300], 257, order)


def test_auto_takes_the_kernels() -> None:
    scores = make_scores("distinct", (1, 8, 40_000), 3)
    ids, counts = topk(scores, device_lengths([40_000]), 1000)
    assert torch.equal(ids.cpu(), expected(scores, [40_000], 1000, "position"))
    assert counts.tolist() == [[1000] * 8]


@pytest.mark.parametrize("style", ["distinct", "clustered", "constant"])
@pytest.mark.parametrize("width", [8_191, 131_072])
def test_the_best_and_the_last(style: str, width: int) -> None:
    """Against the reference, whose top-k the tests on the CPU compare with an oracle."""
    scores, lengths = make_scores(style, (3, 4, width), 9), device_lengths([width, width - 100, 4])
    for share in (None, Share(1, 40, 64), Share(1, 10, 4)):
        for k, last in ((2047, 1), (1000, 6), (0, 2)):
            got = topk_and_last(scores, lengths, k, last, share=share, implementation="triton")
            wanted = topk_and_last(scores, lengths, k, last, share=share, implementation="reference")
            assert torch.equal(got[0], wanted[0])
            assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("k", [9_000, 40_000, 262_144, 300_000])
def test_many_to_choose(k: int) -> None:
    """Longer rankings than one launch merges; and everything there is."""
    scores = make_scores("clustered", (1, 2, 262_144), 4)
    for order in ORDERS:
        expect_topk(scores, [262_100], k, order)


def test_the_same_again_and_again() -> None:
    """Candidates come in any order; the result does not."""
    scores = make_scores("clustered", (4, 8, 131_072), 5)
    lengths = device_lengths([131_072, 100_000, 65_000, 131_071])
    for order in ORDERS:
        first, _ = topk(scores, lengths, 4096, order=order, implementation="triton")
        for _ in range(20):
            assert torch.equal(topk(scores, lengths, 4096, order=order, implementation="triton")[0], first)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("width", [20_000, 131_072])
def test_captured_and_replayed_with_other_lengths(width: int, order: Order) -> None:
    scores = make_scores("distinct", (2, 2, width), 6)
    lengths = device_lengths([width, width])
    topk(scores, lengths, 1024, order=order, implementation="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, counts = topk(scores, lengths, 1024, order=order, implementation="triton")
    for number, now in enumerate(([width, width - 1], [5, 0], [width // 2, 1024], [1025, width])):
        for style in ("distinct", "constant"):
            scores.copy_(make_scores(style, (2, 2, width), 10 + number))
            lengths.copy_(device_lengths(now))
            graph.replay()
            assert torch.equal(ids.cpu(), expected(scores, now, 1024, order))
            assert counts.tolist() == [[min(1024, length)] * 2 for length in now]


@pytest.mark.parametrize("style", ["distinct", "neighbours", "constant", "clustered"])
@pytest.mark.parametrize("heads", [1, 7, 32])
def test_the_union_of_rankings(style: str, heads: int) -> None:
    scores = make_scores(style, (2, heads, 131_072), 7)
    ids, counts = topk(scores, device_lengths([131_072, 700]), 2048, order="score")
    for limit in (1, 2048, 5000):
        merged, found = rank_union(ids, counts, limit, universe=131_072, implementation="triton")
        expect_merged(merged, found, ranked_of(ids, counts), limit)


def test_the_union_captured_and_replayed() -> None:
    scores = make_scores("distinct", (1, 32, 65_536), 8)
    lengths = device_lengths([65_536])

    def step() -> tuple[Tensor, ...]:
        ids, counts = topk(scores, lengths, 512, order="score", implementation="triton")
        return ids, counts, *rank_union(ids, counts, 512, universe=65_536, implementation="triton")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, counts, merged, found = step()
    for length in (65_536, 40_000, 100, 0):
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(ids.cpu(), expected(scores, [length], 512, "score"))
        expect_merged(merged, found, ranked_of(ids, counts), 512)


@pytest.mark.parametrize("style", ["distinct", "clustered", "constant"])
def test_the_union_between_sinks_and_a_window(style: str) -> None:
    """Short rows, whose sinks and window leave nothing, and long ones; as the reference composes them."""
    scores, lengths = make_scores(style, (4, 8, 20_000), 12), device_lengths([20_004, 19_000, 70, 3])
    got, wanted = (
        framed_rank_union(
            *topk(scores, lengths, 1500, order="score", reserved=504, implementation=implementation),
            lengths,
            1500,
            sinks=4,
            window=500,
            universe=20_000,
            implementation=implementation,
        )
        for implementation in IMPLEMENTATIONS
    )
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_a_rule_asks_for_more_ranks_of_rows_whose_heads_agree() -> None:
    """Which rows these are changes from one replay to the next; the CPU's set is of the same scores."""
    rule, lengths = RankUnion(2048, 4, 0.25), device_lengths([30_000, 2100, 700])
    rows = Rows(torch.zeros((3, 1), dtype=torch.int32, device="cuda"), torch.zeros_like(lengths), lengths, 40_000)
    scores = make_scores("distinct", (3, 32, 40_000), 13)

    def step() -> Tensor:
        return rule.choose(scores, rows, 1, 1.0).ids

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = step()
    for agreeing in (1, 20, 32):
        scores.copy_(make_scores("distinct", (3, 32, 40_000), agreeing))
        scores[:, :agreeing] = scores[:, :1].clone()
        graph.replay()
        known = Rows.on_host(torch.zeros((3, 1), dtype=torch.int32), [0] * 3, lengths.tolist())
        assert torch.equal(ids.cpu(), rule.choose(scores.cpu()[:, :, :30_000], known, 1, 1.0).ids)
