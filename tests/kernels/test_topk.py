"""Exact top-k on CPUs: long rows, threads, widths of vectors, and what does not fit."""

import math

import pytest
import torch
from kernel_checks import every_index, fast_index, needs_the_library, refused, threads
from topk_contract import *  # noqa: F403 - its tests, of these implementations
from topk_contract import ORDERS, STYLES, expect_topk, make_scores
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels.topk.api import topk, topk_and_last


@pytest.mark.parametrize("implementation", fast_index)
@pytest.mark.parametrize("style", STYLES)
def test_long_rows_with_ties_far_apart(style: str, implementation: Implementation) -> None:
    """Wide enough that the CPU path narrows the row to blocks; equal scores lie in blocks it leaves out."""
    scores = make_scores(style, (2, 2, 10_007), 3)
    expect_topk(scores, [10_007, 9_000], 256, "position", implementation)
    expect_topk(scores, [10_007, 9_000], 1, "score", implementation)


ORDERS_OF_ROWS = ("rising", "falling", "sampled low", "sampled high", "infinite", "best at the end")


def make_row(kind: str, width: int) -> Tensor:
    """Rows that no sample tells: all the best where it looks, or none, or more than there is room for."""
    rising = torch.arange(width).float()
    if kind == "falling":
        return rising.flip(0)
    if kind.startswith("sampled"):
        # Every 128th run of 8 neighbours is in the sample of such a row.
        looked_at = torch.arange(width) % 128 < 8
        return torch.where(looked_at == (kind == "sampled high"), 1e9, 0.0) + rising % 1000
    if kind == "infinite":
        return torch.full((width,), math.inf).scatter(0, torch.arange(0, width, 3), -math.inf)
    return torch.where(rising < width - 300, -1.0, rising) if kind == "best at the end" else rising


@needs_the_library
@pytest.mark.parametrize("kind", ORDERS_OF_ROWS)
def test_rows_unlike_their_sample(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = make_row(kind, 128 * 256)[None, None]
    for lanes in (4, 8, 16):
        monkeypatch.setattr(native, "widest", lanes)
        for order in ORDERS:
            for k in (1, 200, 2047):
                expect_topk(row, [row.shape[2]], k, order, "native")
            expect_topk(row[..., :30_001], [29_999], 20_000, order, "native")


@pytest.mark.parametrize("implementation", every_index)
def test_rows_by_strides(implementation: Implementation) -> None:
    """A part of wider rows, rows that share memory, and numbers that are not neighbours."""
    wide = make_scores("clustered", (2, 3, 700), 5)
    for view in (
        wide[:, :, 5:],
        wide[:, ::2, :600],
        wide[:, :1].expand(-1, 3, -1),
        wide.transpose(0, 1),
        wide[..., ::2],
    ):
        expect_topk(view, [view.shape[2] - 1] * view.shape[0], 50, "position", implementation)
        expect_topk(view, [view.shape[2]] * view.shape[0], 50, "score", implementation)


@needs_the_library
@pytest.mark.parametrize("style", ["distinct", "clustered"])
def test_two_threads_choose_the_same(style: str) -> None:
    scores = make_scores(style, (2, 3, 100_000), 2)
    lengths = torch.tensor([100_000, 70_001], dtype=torch.int32)
    alone = topk(scores, lengths, 999, order="score", implementation="native")
    with threads(2):
        together = topk(scores, lengths, 999, order="score", implementation="native")
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


@needs_the_library
@pytest.mark.parametrize(("lanes", "bits"), [(4, 0x7FFFFFFF), (8, -1), (16, 0x7F800001)])
def test_nan_leads_nowhere(lanes: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which positions are chosen is undefined, but they exist, and each is chosen once."""
    monkeypatch.setattr(native, "widest", lanes)
    scores = torch.randn(1, 4, 9001, generator=torch.Generator().manual_seed(1))
    for group, share in enumerate((1, 2, 7, 900)):
        scores[0, group, ::share] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    ids, counts = topk(scores, torch.tensor([9000], dtype=torch.int32), 700, implementation="native")
    assert counts.tolist() == [[700] * 4]
    for chosen in ids[0].tolist():
        assert chosen == sorted(set(chosen))
        assert 0 <= chosen[0] <= chosen[-1] < 9000


@needs_the_library
def test_lengths_out_of_bounds_are_refused() -> None:
    for length in (-1, 6):
        lengths = torch.tensor([length], dtype=torch.int32)
        refused("length", topk, torch.zeros(1, 1, 5), lengths, 2, implementation="native")


def test_arguments_that_do_not_fit_are_named() -> None:
    scores, lengths = torch.zeros(2, 1, 5), torch.tensor([5, 5], dtype=torch.int32)
    refused("float32", topk, scores.double(), lengths, 2)
    refused("int32", topk, scores, lengths.long(), 2)
    refused("lengths", topk, scores, lengths[:1], 2)
    refused("k must", topk, scores, lengths, 0)
    refused("order", topk, scores, lengths, 2, order="best")
    refused("tiles", topk_and_last, scores, lengths, 2, 1, tiles=torch.zeros(2, 1, 2))
    refused("k and last", topk_and_last, scores, lengths, 2, -1)
    refused("unit at least 1", topk_and_last, scores, lengths, 2, 1, unit=0)


@pytest.mark.parametrize("implementation", every_index)
def test_every_k(implementation: Implementation) -> None:
    """Among few distinct scores the cut falls between equals for almost every k."""
    for style in STYLES:
        scores = make_scores(style, (1, 2, 64), 7)
        for k in range(1, 66):
            expect_topk(scores, [64], k, "position", implementation)
            expect_topk(scores, [61], k, "score", implementation)
