"""Exact top-k, ties and infinities included."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import INTERPRETED, every_index, fewer, threads
from kernel_checks import fast_index as fast
from kernel_checks import index_implementations as implementations
from torch import Tensor

import oracles
from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels._share import Share
from saccade.kernels.topk.api import Order, topk, topk_and_last

STYLES = ("distinct", "clustered", "constant", "masked", "forced", "zeros")
DEVICE_STYLES = ("distinct", "clustered", "neighbours", "constant", "lowest", "highest", "forced", "zeros", "tiny")
"""Of rows that kernels for devices cut into parts and blocks."""


def make_scores(style: str, shape: tuple[int, int, int], seed: int, device: str = "cpu", wide: int = 1) -> Tensor:
    """`wide`: so many times as many neighbours are best, and so many times fewer are forced."""
    random = torch.Generator(device).manual_seed(seed)
    scores, coin = (draw(shape, generator=random, device=device) for draw in (torch.randn, torch.rand))
    return {
        "distinct": scores,
        "clustered": scores.round(),
        "neighbours": scores + 9.0 * (torch.arange(shape[2], device=device) // (100 * wide) == 2),
        "constant": torch.full_like(scores, -2.5),
        "lowest": torch.full_like(scores, -math.inf),
        "highest": torch.full_like(scores, math.inf),
        "masked": scores.masked_fill(coin < 0.7, -math.inf),
        "forced": scores.masked_fill(coin < 0.2 / wide, math.inf).masked_fill(coin > 0.6 / wide, -math.inf),
        "zeros": torch.where(coin < 0.5, -0.0, 0.0),
        "tiny": scores * 1e-41,  # denormal
    }[style]


shares = st.one_of(
    st.none(),
    st.builds(
        lambda part, denominator, minimum: Share(round(part * denominator), denominator, minimum),
        st.floats(0, 1),
        st.one_of(st.integers(1, 20), st.just(2**31 - 1)),
        st.integers(1, 60),
    ),
)


def room_of(share: Share | None, length: int, k: int, ending: int) -> int:
    """How many of a row may be chosen beside those that end it."""
    if share is None:
        return k
    size = max(share.minimum, math.ceil(length * Fraction(share.numerator, share.denominator)))
    return min(k, max(min(size, length) - ending, 0))


def expect_topk(scores: Tensor, lengths: list[int], k: int, order: Order, implementation: Implementation) -> None:
    ids, counts = topk(scores, torch.tensor(lengths, dtype=torch.int32), k, order=order, implementation=implementation)
    width = min(k, scores.shape[2])
    assert ids.dtype == counts.dtype == torch.int32
    assert ids.shape == (*scores.shape[:2], width)
    assert counts.tolist() == [[min(k, length)] * scores.shape[1] for length in lengths]
    for row, length in enumerate(lengths):
        for group in range(scores.shape[1]):
            wanted = oracles.topk(scores[row, group].tolist(), length, k)
            if order == "position":
                wanted.sort()
            assert ids[row, group].tolist() == wanted + [-1] * (width - len(wanted))


@fewer(40)
@given(
    st.sampled_from(DEVICE_STYLES if INTERPRETED else STYLES),
    st.lists(st.floats(0, 1), min_size=1, max_size=2 if INTERPRETED else 3),
    st.integers(1, 2 if INTERPRETED else 3),
    st.one_of(st.integers(1, 40), st.integers(100, 400)),
    st.one_of(st.integers(1, 9), st.integers(1, 200 if INTERPRETED else 450)),
    st.sampled_from(("position", "score")),
    implementations,
    st.integers(0, 2**31),
)
def test_topk_matches_the_oracle(
    style: str, shares: list[float], groups: int, width: int, k: int, order: Order, implementation: Implementation,
    seed: int,
) -> None:  # fmt: skip
    scores = make_scores(style, (len(shares), groups, width), seed)
    lengths = [round(share * width) for share in shares]
    for row, length in enumerate(lengths):
        scores[row, :, length:] = math.inf  # better than everything, and not to be chosen
    expect_topk(scores, lengths, k, order, implementation)


@fewer(40)
@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30),
    st.integers(1, 30),
    st.sampled_from(("position", "score")),
    implementations,
)
def test_any_floats(values: list[float], k: int, order: Order, implementation: Implementation) -> None:
    expect_topk(torch.tensor([[values]]), [len(values)], k, order, implementation)


@pytest.mark.parametrize("implementation", every_index)
@pytest.mark.parametrize("style", STYLES)
def test_every_k(style: str, implementation: Implementation) -> None:
    """Among few distinct scores the cut falls between equals for almost every k."""
    scores = make_scores(style, (1, 2, 64), 7)
    for k in range(1, 66):
        expect_topk(scores, [64], k, "position", implementation)
        expect_topk(scores, [61], k, "score", implementation)


@pytest.mark.parametrize("implementation", fast)
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


@pytest.mark.parametrize("order", ["position", "score"])
@pytest.mark.parametrize("lanes", [4, 8, 16] if native.library() is not None else [])
@pytest.mark.parametrize("kind", ORDERS_OF_ROWS)
def test_rows_unlike_their_sample(kind: str, lanes: int, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "widest", lanes)
    row = make_row(kind, 128 * 256)[None, None]
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


@pytest.mark.parametrize("style", STYLES if native.library() is not None else [])
def test_two_threads_choose_the_same(style: str) -> None:
    scores = make_scores(style, (2, 3, 100_000), 2)
    lengths = torch.tensor([100_000, 70_001], dtype=torch.int32)
    alone = topk(scores, lengths, 999, order="score", implementation="native")
    with threads(2):
        together = topk(scores, lengths, 999, order="score", implementation="native")
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


@pytest.mark.parametrize("lanes", [4, 8, 16] if native.library() is not None else [])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001])
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


@pytest.mark.parametrize("length", [-1, 6] if native.library() is not None else [])
def test_lengths_out_of_bounds_are_refused(length: int) -> None:
    with pytest.raises(KernelError, match="length"):
        topk(torch.zeros(1, 1, 5), torch.tensor([length], dtype=torch.int32), 2, implementation="native")


def expect_topk_and_last(
    scores: Tensor, tokens: list[int], k: int, last: int, share: Share | None, unit: int = 1, *,
    implementation: Implementation,
) -> None:  # fmt: skip
    ends = torch.tensor(tokens, dtype=torch.int32)
    ids, counts = topk_and_last(scores, ends, k, last, unit=unit, share=share, implementation=implementation)
    width = min(k, scores.shape[2]) + last
    assert ids.dtype == counts.dtype == torch.int32
    assert ids.shape == (*scores.shape[:2], width)
    for row, length in enumerate(math.ceil(Fraction(number, unit)) for number in tokens):
        others = max(length - last, 0)
        room = room_of(share, length, k, length - others)
        for group in range(scores.shape[1]):
            wanted = sorted(oracles.topk(scores[row, group].tolist(), others, room)) + list(range(others, length))
            assert counts[row, group] == len(wanted)
            assert ids[row, group].tolist() == wanted + [-1] * (width - len(wanted))


@fewer(40)
@given(
    st.sampled_from(DEVICE_STYLES if INTERPRETED else STYLES),
    st.lists(st.floats(0, 1), min_size=1, max_size=2 if INTERPRETED else 3),
    st.integers(1, 300 if INTERPRETED else 50),
    st.integers(0, 150 if INTERPRETED else 60),
    st.integers(0, 5),
    st.integers(1, 5),
    shares,
    implementations,
    st.integers(0, 2**31),
)
def test_the_last_entries_follow_the_best(
    style: str, rows: list[float], width: int, k: int, last: int, unit: int, share: Share | None,
    implementation: Implementation, seed: int,
) -> None:  # fmt: skip
    scores = make_scores(style, (len(rows), 2, width), seed)
    tokens = [round(part * width * unit) for part in rows]
    expect_topk_and_last(scores, tokens, k, last, share, unit, implementation=implementation)


def test_arguments_that_do_not_fit_are_named() -> None:
    scores, lengths = torch.zeros(2, 1, 5), torch.tensor([5, 5], dtype=torch.int32)
    with pytest.raises(KernelError, match="float32"):
        topk(scores.double(), lengths, 2)
    with pytest.raises(KernelError, match="int32"):
        topk(scores, lengths.long(), 2)
    with pytest.raises(KernelError, match="lengths"):
        topk(scores, lengths[:1], 2)
    with pytest.raises(KernelError, match="k must"):
        topk(scores, lengths, 0)
    with pytest.raises(KernelError, match="order"):
        topk(scores, lengths, 2, order="best")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="k and last"):
        topk_and_last(scores, lengths, 2, -1)
    with pytest.raises(KernelError, match="unit at least 1"):
        topk_and_last(scores, lengths, 2, 1, unit=0)
