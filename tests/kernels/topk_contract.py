"""What every implementation of top-k gives: exact sets, ties and infinities included, and what ends a row."""

import math
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_caches import int32
from kernel_checks import INTERPRETED, fewer, index_implementations, seeds
from torch import Tensor

import oracles
from saccade.kernels._dispatch import Implementation
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


ORDERS: tuple[Order, ...] = ("position", "score")
orders = st.sampled_from(ORDERS)
styles = st.sampled_from(DEVICE_STYLES if INTERPRETED else STYLES)
shares = st.one_of(
    st.none(),
    st.builds(
        lambda part, denominator, minimum: Share(round(part * denominator), denominator, minimum),
        st.floats(0, 1),
        st.one_of(st.integers(1, 20), st.just(2**31 - 1)),
        st.one_of(st.just(1), st.integers(1, 60)),
    ),
)


def room_of(share: Share | None, length: int, k: int, ending: int) -> int:
    """How many of a row may be chosen beside those that end it."""
    if share is None:
        return k
    size = max(share.minimum, math.ceil(length * Fraction(share.numerator, share.denominator)))
    return min(k, max(min(size, length) - ending, 0))


def expect_chosen(
    ids: Tensor, counts: Tensor, scores: Tensor, lengths: list[int], k: int, order: Order = "position"
) -> None:
    """What `topk` has found in rows of so many entries."""
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


def expect_topk(
    scores: Tensor, lengths: list[int], k: int, order: Order, implementation: Implementation, reserved: int = 0
) -> None:
    given = int32(lengths, scores.device)
    found = topk(scores, given, k, order=order, reserved=reserved, implementation=implementation)
    expect_chosen(*found, scores, [max(length - reserved, 0) for length in lengths], k, order)


def expect_topk_and_last(
    scores: Tensor,
    tokens: list[int],
    k: int,
    last: int,
    share: Share | None,
    unit: int = 1,
    tiles: Tensor | None = None,
    *,
    implementation: Implementation,
) -> None:
    ends = int32(tokens, scores.device)
    how: dict[str, Any] = {"unit": unit, "share": share, "tiles": tiles, "implementation": implementation}
    ids, counts = topk_and_last(scores, ends, k, last, **how)
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


floats = st.floats(width=32, allow_nan=False)
FEW = 2 if INTERPRETED else 3
Rows = tuple[Tensor, list[float]]


@st.composite
def scored(draw: st.DrawFn, widths: st.SearchStrategy[int]) -> Rows:
    """Scores `[B, G, n]`, and which share of each row is there."""
    parts = draw(st.lists(st.floats(0, 1), min_size=1, max_size=FEW))
    return make_scores(draw(styles), (len(parts), draw(st.integers(1, FEW)), draw(widths)), draw(seeds)), parts


@fewer(40)
@given(
    scored(st.one_of(st.integers(1, 40), st.integers(100, 400))),
    st.one_of(st.integers(1, 9), st.integers(1, 200 if INTERPRETED else 450)),
    st.sampled_from((0, 0, 7)),
    orders,
    index_implementations,
)
def test_topk_matches_the_oracle(rows: Rows, k: int, reserved: int, order: Order, how: Implementation) -> None:
    scores, parts = rows
    lengths = [round(part * scores.shape[2]) for part in parts]
    for row, length in enumerate(lengths):
        scores[row, :, length:] = math.inf  # better than everything, and not to be chosen
    expect_topk(scores, [length + reserved for length in lengths], k, order, how, reserved)


@fewer(40)
@given(st.lists(floats, min_size=1, max_size=30), st.integers(1, 30), orders, index_implementations)
def test_any_floats(values: list[float], k: int, order: Order, implementation: Implementation) -> None:
    expect_topk(torch.tensor([[values]]), [len(values)], k, order, implementation)


@fewer(40)
@given(
    scored(st.integers(1, 300 if INTERPRETED else 50)),
    st.integers(0, 150 if INTERPRETED else 60),
    st.integers(0, 5),
    st.integers(1, 5),
    shares,
    index_implementations,
)
def test_the_last_entries_follow_the_best(
    rows: Rows, k: int, last: int, unit: int, share: Share | None, how: Implementation
) -> None:
    scores, parts = rows
    tokens = [round(part * scores.shape[2] * unit) for part in parts]
    expect_topk_and_last(scores, tokens, k, last, share, unit, implementation=how)
