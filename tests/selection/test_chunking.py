"""Cutting text: delimiter levels of vocabulary pieces, and chunks against a naive cut and texts cut by hand."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import PolicyError
from saccade.selection.chunking import cut, delimiter_levels


@pytest.mark.parametrize(
    ("piece", "level"),
    [
        ("\n\n", 1),
        (".\n\n", 1),
        ("\r\n\r\n", 1),
        ("---", 1),
        ("***", 1),
        ("```", 1),
        ("```python", 1),
        ("}", 1),
        (" ]", 1),
        ("/>", 1),
        ("--", 0),
        ("**", 0),
        ("``", 0),
        ("{", 0),
        ("[", 0),
        ("<", 0),
        (".", 2),
        ("?", 2),
        ("!", 2),
        ("。", 2),
        ("？", 2),
        ("！", 2),
        ("\n", 2),
        ("\r\n", 2),
        ("\n ", 2),
        ("3.14", 2),
        (",", 3),
        (";", 3),
        (":", 3),
        ("，", 3),
        ("；", 3),
        ("：", 3),
        ("、", 3),
        (", ", 3),
        (" word", 4),
        ("\t", 4),
        ("word", 0),
        ("", 0),
        ("-", 0),
        ("\u00a0", 0),
    ],
)
def test_level_of_a_piece(piece: str, level: int) -> None:
    assert delimiter_levels([piece]) == [level]


def test_levels_keep_the_vocabulary_order() -> None:
    assert delimiter_levels(iter(["a", ".", "}", " ", ","])) == [0, 2, 1, 4, 3]


def chunks_of(text: str, minimum: int, maximum: int) -> list[str]:
    """A text cut with words, spaces and marks as tokens; the rest that is no chunk comes last."""
    tokens = re.findall(r"\n+|\w+|[^\w\n]", text)
    lengths = cut(delimiter_levels(tokens), len(tokens), minimum, maximum)
    edges = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    found = ["".join(tokens[start:stop]) for start, stop in pairwise(edges)]
    return [*found, "".join(tokens[edges[-1] :])]


@pytest.mark.parametrize(
    ("text", "minimum", "maximum", "expected"),
    [
        # The full stop beats spaces behind it; then the comma; then the last space; what is left is too short.
        (
            "It was late. So we went home, and nobody said a word about it any more",
            4,
            12,
            ["It was late.", " So we went home,", " and nobody said a word ", "about it any ", "more"],
        ),
        # Among equals the last one.
        ("a,b,c,d,e,f", 2, 5, ["a,b,", "c,d,", "e,", "f"]),
        # Code ends behind its bracket, not at a semicolon inside.
        ("f(x){g(x);h(x)}k(y);", 4, 16, ["f(x){g(x);h(x)}", "k(y);", ""]),
        # A blank line beats the comma, a single newline too.
        (
            "One line here\nand another, longer one\n\nA new paragraph starts",
            6,
            12,
            ["One line here\n", "and another, longer one\n\n", "A new paragraph ", "starts"],
        ),
    ],
)
def test_texts_cut_by_hand(text: str, minimum: int, maximum: int, expected: list[str]) -> None:
    assert chunks_of(text, minimum, maximum) == expected


def test_without_a_delimiter_the_longest_chunk() -> None:
    assert cut([0] * 20, 20, 8, 16) == [16]
    assert cut([0] * 24, 24, 8, 16) == [16, 8]
    assert cut([0] * 7, 7, 8, 16) == []


def test_fixed_chunks() -> None:
    assert cut(None, 40, 8, 16) == [16, 16, 8]
    assert cut(None, 39, 8, 16) == [16, 16]
    assert cut(None, 5, 8, 16) == []
    assert cut(None, 3, 1, 1) == [1, 1, 1]


def naive(levels: list[int], length: int, minimum: int, maximum: int) -> list[int]:
    """Chunks of `minimum` to `maximum` tokens, cut behind the strongest delimiter (section 4.3), word by word."""
    lengths, start = [], 0
    while length - start >= minimum:
        allowed = range(minimum, min(maximum, length - start) + 1)
        ends = {n: levels[start + n - 1] for n in allowed}
        present = [level for level in ends.values() if level > 0]
        best = max(allowed) if not present else max(n for n in allowed if ends[n] == min(present))
        lengths.append(best)
        start += best
    return lengths


@given(st.lists(st.integers(0, 4), max_size=80), st.integers(1, 10), st.integers(0, 10))
def test_against_a_naive_cut(levels: list[int], minimum: int, more: int) -> None:
    lengths = cut(levels, len(levels), minimum, minimum + more)
    assert lengths == naive(levels, len(levels), minimum, minimum + more)
    assert 0 <= len(levels) - sum(lengths) < minimum


def test_levels_may_go_on_behind_the_stretch() -> None:
    assert cut([0, 0, 0, 0, 1], 4, 2, 5) == [4]


def test_errors() -> None:
    with pytest.raises(PolicyError, match="chunks of 9 to 8 tokens"):
        cut(None, 10, 9, 8)
    with pytest.raises(PolicyError, match="chunks of 0 to 8 tokens"):
        cut(None, 10, 0, 8)
    with pytest.raises(PolicyError, match="levels of 3 tokens cannot cut a stretch of 4"):
        cut([0, 0, 0], 4, 2, 4)
