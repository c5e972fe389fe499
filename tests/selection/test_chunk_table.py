"""Chunks cut on the device, of many rows at once: against a naive cut, and texts cut by hand."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.text.history import TokenHistory
from saccade.text.levels import break_codes
from saccade.text.table import ChunkTable, Cuts
from saccade.types import Intake

NEWLINE = break_codes(["\n"])[0]
LEVELS = (0, 1, 2, 3, 4, *break_codes([",x", "]x"]), NEWLINE)
BEHIND, FRONT = {1: 1, 2: 2, 3: 3, 4: 4, 7: 2}, {5: 3, 6: 1, 7: 5}
"""Levels around ids; two newlines are a blank line."""
UNKNOWN = 8


def table_of(cuts: Cuts, ids: Sequence[Sequence[int]], levels: Sequence[int] = LEVELS) -> ChunkTable:
    """A table of rows that were fed, none of which is cut yet."""
    history = TokenHistory(levels)
    padded = torch.zeros((len(ids), max(map(len, ids))), dtype=torch.int64)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    history.record(0, padded.shape[1], len(ids), padded, None)
    return ChunkTable(cuts, history, len(ids), max(padded.shape[1], 300), torch.device("cpu"))


def edges(table: ChunkTable, row: int = 0) -> list[int]:
    found = table.edges[row, : int(table.counts[row]) + 1].tolist()
    assert int(table.ends[row]) == (found[-1] if len(found) > 1 else 0)
    return found


def naive(levels: Sequence[int], cuts: Cuts, stop: int) -> list[int]:
    """Cut at the strongest break, among equals the latest (section 4.3), once the window is full."""
    found = [cuts.first]

    def strength(at: int, last: int) -> int:
        """Of the break behind token `at`; what follows the last one of the window does not count."""
        after = FRONT.get(levels[at + 1], 6) if at < last else 6
        blank = 1 if at and levels[at - 1] == levels[at] == 7 else 6
        return min(BEHIND.get(levels[at], 6), after, blank)

    while found[-1] + cuts.longest <= stop:
        window = levels[found[-1] : found[-1] + cuts.longest]
        allowed = range(cuts.shortest, cuts.longest + 1)
        levels_of = {n: strength(found[-1] + n - 1, found[-1] + cuts.longest - 1) for n in allowed}
        length = max(n for n in allowed if levels_of[n] == min(levels_of.values()))
        found.append(found[-1] + (cuts.longest if UNKNOWN in window else length))
    return found


@st.composite
def sizes(draw: st.DrawFn) -> Cuts:
    shortest = draw(st.integers(1, 6))
    longest = shortest + draw(st.integers(0, 7))
    return Cuts(draw(st.integers(0, 5)), shortest, longest)


@settings(deadline=None)
@given(cuts=sizes(), data=st.data())
def test_against_a_naive_cut(cuts: Cuts, data: st.DataObject) -> None:
    """Rows of any length, in pieces, cleared and fed other tokens: the chunks are those of the tokens there are."""
    tokens = st.lists(st.sampled_from([0, 0, 0, *range(1, UNKNOWN + 1), 7]), min_size=1, max_size=90)
    ids = data.draw(st.lists(tokens, min_size=1, max_size=3))
    table = table_of(cuts, ids)
    history = table.text
    assert isinstance(history, TokenHistory)
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.integers(0, len(ids) - 1))
        ids[row] = data.draw(st.lists(st.integers(0, UNKNOWN), min_size=len(ids[row]), max_size=max(90, len(ids[row]))))
        width = max(map(len, ids))
        history.record(0, width, len(ids), torch.tensor([one + [0] * (width - len(one)) for one in ids]), None)
        table.clear(row)
        assert edges(table, row) == [cuts.first]
        stops = [data.draw(st.integers(0, len(one))) for one in ids]
        table.take_in([Intake(number, 0, 0, stop) for number, stop in enumerate(stops)])
        for number, stop in enumerate(stops):
            expected, known = naive(ids[number], cuts, stop), data.draw(st.integers(0, stop))
            assert edges(table, number) == expected
            counted = int(table.counted(torch.tensor([number]), torch.tensor([known])))
            assert counted == len(naive(ids[number], cuts, known)) - 1
            assert len(expected) - 1 - counted <= cuts.decided(known, stop)


@given(st.integers(0, 30), st.integers(0, 30))
@settings(deadline=None)
def test_rows_begin_at_their_own_slots(first: int, second: int) -> None:
    """Left padding moves no edge, which are logical positions."""
    text = [0, 3, 0, 0, 2, 0, 1, 0, 0, 4, 0, 0, 0, 3, 0] * 4
    cuts = Cuts(1, 2, 5)
    table = table_of(cuts, [[0] * first + text, [0] * second + text])
    table.take_in([Intake(0, first, 0, 60), Intake(1, second, 0, 44)])
    assert edges(table, 0) == naive(text, cuts, 60)
    assert edges(table, 1) == naive(text, cuts, 44)


def test_what_was_cut_is_cut_again_only_where_it_was_forgotten() -> None:
    """Who looks at fewer tokens, and then at all, finds what was cut."""
    cuts, text = Cuts(0, 2, 4), [0, 1, 0] * 13
    table = table_of(cuts, [text] * 2)
    for stop in (39, 12, 39, 39):
        table.take_in([Intake(0, 0, 0, stop), Intake(1, 0, 0, stop)])
        assert edges(table, 0) == edges(table, 1) == naive(text, cuts, stop)
        table.text = TokenHistory()
    table.clear(1)
    # Fewer and longer ones than there were.
    table.take_in([Intake(0, 0, 0, 39), Intake(1, 0, 0, 39)])
    assert (edges(table, 0), edges(table, 1)) == (naive(text, cuts, 39), naive([0] * 39, cuts, 39))


def test_a_delimiter_that_begins_in_front_of_what_is_cut_counts() -> None:
    """Token by token, and at once."""
    cuts, text = Cuts(1, 1, 3), [7, 7, 2, 0] * 9
    table = table_of(cuts, [text])
    for stop in range(1, len(text)):
        table.take_in([Intake(0, 0, 0, stop)])
        assert edges(table) == naive(text, cuts, stop)


def test_rows_are_added_and_move() -> None:
    table = table_of(Cuts(1, 2, 4), [[0] * 40, [0] * 40])
    table.take_in([Intake(0, 0, 0, 21), Intake(1, 0, 0, 9)])
    one, other = edges(table, 0), edges(table, 1)
    table.arrange(torch.tensor([1, 0, 1, 2]), 449)
    assert [edges(table, row) for row in range(4)] == [other, one, other, [1]]
    assert table.stops == [9, 21, 9, 0] and table.edges.shape == (4, 450)


def test_without_levels_chunks_have_one_length() -> None:
    for table in (
        ChunkTable(Cuts(2, 3, 6), None, 1, 13, torch.device("cpu")),
        ChunkTable(Cuts(2, 3, 6), TokenHistory(), 1, 13, torch.device("cpu")),
    ):
        table.take_in([Intake(0, 0, 0, 40)])
        assert edges(table) == [2, 8, 14, 20, 26, 32, 38]


def chunks_of(text: str, minimum: int, maximum: int) -> list[str]:
    """A text cut with words, spaces and marks as tokens, as if more text followed."""
    tokens = re.findall(r"\n+|\w+|[^\w\n]", text)
    levels = [*break_codes(tokens), 0]
    ids = [*range(len(tokens)), *[len(tokens)] * maximum]
    table = table_of(Cuts(0, minimum, maximum), [ids], levels)
    table.take_in([Intake(0, 0, 0, len(ids))])
    return ["".join(tokens[start:stop]) for start, stop in pairwise(edges(table)) if start < len(tokens)]


@pytest.mark.parametrize(
    ("minimum", "maximum", "cut"),
    [
        # The full stop beats spaces behind it; then the comma; then the last space; what is left is too short.
        (4, 12, "It was late.| So we went home,| and nobody said a word |about it any |more"),
        # Among equals the last one.
        (2, 5, "a,b,|c,d,|e,|f"),
        # Code ends behind its bracket, not at a semicolon inside.
        (4, 16, "f(x){g(x);h(x)}|k(y);"),
        # A blank line beats the comma, a single newline too.
        (6, 12, "One line here\n|and another, longer one\n\n|A new paragraph |starts"),
    ],
)
def test_texts_cut_by_hand(minimum: int, maximum: int, cut: str) -> None:
    assert chunks_of(cut.replace("|", ""), minimum, maximum) == cut.split("|")
