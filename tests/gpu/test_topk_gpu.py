"""Top-k and the union on a CUDA device: long rows, clusters and constants, and replayed with other lengths."""

from functools import partial

import pytest
import topk_contract
import torch
from device_caches import captured
from kernel_caches import int32
from test_rank_union import expect_merged, rank_union, ranked_of
from topk_contract import DEVICE_STYLES as STYLES
from topk_contract import ORDERS, expect_chosen
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels._share import Share
from saccade.kernels.rank_union.api import framed_rank_union
from saccade.kernels.topk.api import Order, topk
from saccade.selection.rules.rank_union import RankUnion
from saccade.types import Rows

# Of rows a hundred times as long.
make_scores = partial(topk_contract.make_scores, device="cuda", wide=30)
device_lengths = partial(int32, device="cuda")
expect_topk = partial(topk_contract.expect_topk, implementation="triton")


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
    expect_chosen(*topk(scores, device_lengths([40_000]), 1000), scores, [40_000], 1000)


@pytest.mark.parametrize("style", ["distinct", "clustered", "constant"])
@pytest.mark.parametrize("width", [8_191, 131_072])
def test_the_best_and_the_last(style: str, width: int) -> None:
    scores, lengths = make_scores(style, (3, 4, width), 9), [width, width - 100, 4]
    for share in (None, Share(1, 40, 64), Share(1, 10, 4)):
        for k, last in ((2047, 1), (1000, 6), (0, 2)):
            topk_contract.expect_topk_and_last(scores, lengths, k, last, share, implementation="triton")


@pytest.mark.parametrize("style", STYLES)
def test_the_best_of_neighbours_are_known(style: str) -> None:
    scores, lengths = make_scores(style, (3, 4, 65_000), 11), [65_000, 64_017, 4_200]
    tiles = torch.nn.functional.pad(scores, (0, 24), value=-torch.inf).unflatten(2, (2032, 32)).amax(3)
    for k, last in ((127, 1), (1, 0), (100, 6)):
        topk_contract.expect_topk_and_last(scores, lengths, k, last, None, tiles=tiles, implementation="triton")


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
    graph, found = captured(lambda: topk(scores, lengths, 1024, order=order, implementation="triton"))
    for number, now in enumerate(([width, width - 1], [5, 0], [width // 2, 1024], [1025, width])):
        for style in ("distinct", "constant"):
            scores.copy_(make_scores(style, (2, 2, width), 10 + number))
            lengths.copy_(device_lengths(now))
            graph.replay()
            expect_chosen(*found, scores, now, 1024, order)


def test_the_union_captured_and_replayed() -> None:
    scores = make_scores("distinct", (1, 32, 65_536), 8)
    lengths = device_lengths([65_536])

    def step() -> tuple[Tensor, ...]:
        ids, counts = topk(scores, lengths, 512, order="score", implementation="triton")
        return ids, counts, *rank_union(ids, counts, 512, universe=65_536, implementation="triton")

    graph, (ids, counts, merged, found) = captured(step)
    for length in (65_536, 40_000, 100, 0):
        lengths.fill_(length)
        graph.replay()
        expect_chosen(ids, counts, scores, [length], 512, "score")
        expect_merged(merged, found, ranked_of(ids, counts), 512)


@pytest.mark.parametrize("style", ["distinct", "clustered", "constant"])
def test_the_union_between_sinks_and_a_window(style: str) -> None:
    """Short rows, whose sinks and window leave nothing, and long ones; as the reference composes them."""
    scores, lengths = make_scores(style, (4, 8, 20_000), 12), device_lengths([20_004, 19_000, 70, 3])

    def union(how: Implementation) -> tuple[Tensor, Tensor]:
        ranked = topk(scores, lengths, 1500, order="score", reserved=504, implementation=how)
        frame = {"sinks": 4, "window": 500, "universe": 20_000}
        return framed_rank_union(*ranked, lengths, 1500, **frame, implementation=how)

    for one, other in zip(union("triton"), union("reference"), strict=True):
        assert torch.equal(one, other)


def test_a_rule_asks_for_more_ranks_of_rows_whose_heads_agree() -> None:
    """Which rows these are changes from one replay to the next; the CPU's set is of the same scores."""
    rule, lengths = RankUnion(2048, 4, 0.25), device_lengths([30_000, 2100, 700])
    rows = Rows(torch.zeros((3, 1), dtype=torch.int32, device="cuda"), torch.zeros_like(lengths), lengths, 40_000)
    scores = make_scores("distinct", (3, 32, 40_000), 13)

    graph, ids = captured(lambda: rule.choose(scores, rows, 1, 1.0).ids)
    for agreeing in (1, 20, 32):
        scores.copy_(make_scores("distinct", (3, 32, 40_000), agreeing))
        scores[:, :agreeing] = scores[:, :1].clone()
        graph.replay()
        known = Rows.on_host(torch.zeros((3, 1), dtype=torch.int32), [0] * 3, lengths.tolist())
        assert torch.equal(ids.cpu(), rule.choose(scores.cpu()[:, :, :30_000], known, 1, 1.0).ids)
