"""Where text breaks: in front of and behind vocabulary pieces, over two of them, and in a real text."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from claims.methods.cuts_anywhere import anywhere
from saccade.checkpoints.load import ModelSource
from saccade.checkpoints.text import delimiter_table
from saccade.text.history import TokenHistory
from saccade.text.levels import break_codes, breaks
from saccade.text.table import ChunkTable, Cuts
from saccade.types import Intake

# (level behind a piece, in front of it); 0: inside of a word, if the neighbour is one, too.
PIECES = {
    (0, 0): ["word", "", "3.14", "a,b", "x y", "_", "\ufffd"],
    (5, 5): ["--", "**", "``", "{", "[", "<", "-", "\u00a0"],
    (0, 5): [".name", "(name"],
    (1, 5): ["\n\n", ".\n\n", "\r\n\r\n", "---", "***", "```", "}", "/>", "),\n\n    "],
    (1, 4): [" ]", " }"],
    (0, 1): ["```python", "]foo"],
    (2, 5): [".", "?", "!", "。", "？", "！", "\n", "\r\n", "\n ", ". "],
    (2, 0): ["end."],
    (0, 2): ["\n    return"],
    (3, 5): [",", ";", ":", "，", "；", "：", "、", "·", ", ", '",'],
    (0, 3): [",name"],
    (4, 5): ["\t", " ", "  "],
    (4, 0): ["word "],
    (5, 4): [" ("],
    (0, 4): [" word", "\tdef"],
}
LONG = ["word", " the", "--", "-", "\n", "\nfoo", "-x", "**", "*", "`", "``", ".", ".name", ",", "}", " }", "```", ""]


def test_levels_around_a_piece() -> None:
    for levels, piece in ((levels, piece) for levels, pieces in PIECES.items() for piece in pieces):
        codes = torch.tensor([break_codes(["x", piece, "x"])])
        before, behind, _ = (level % 6 for level in breaks(codes)[0][0].tolist())
        assert (behind, before) == levels, piece
        assert [level % 6 for level in breaks(codes)[1][0].tolist()] == [0, levels[0], 0], piece


def naive(pieces: Sequence[str], at: int, follows: bool) -> int:
    """The strongest break behind piece `at`, 6 without; `follows`: whether the next piece is looked at."""
    alone = ("\n\n|---|\\*\\*\\*|```|[]}>]", "\\.(?=\\s*$)|[?!\n]", "[,;:]", "[ \t]")
    here, after, found = pieces[at], pieces[at + 1] if follows and at + 1 < len(pieces) else "", [6]

    def word(text: str, level: int) -> bool:
        return bool(text.strip()) if level == 4 else any(sign.isalnum() or sign == "_" for sign in text)

    if (here and not word(here[-1], 1)) or (after and not word(after[0], 1)):
        found.append(5)
    for level, marks in enumerate(alone, 1):
        # `$` would stand in front of a last newline, too.
        marks = marks.replace("$", "\\Z")
        if any(not word(here[one.end() :], level) for one in re.finditer(marks, here)):
            found.append(level)
        begun = [(after[: one.start()], after[one.end() :]) for one in re.finditer(marks, after)]
        if any(word(rest, level) and not word(before, level) for before, rest in begun):
            found.append(level)

    def over(left: str, right: str) -> str:
        """The sign of which the end of one piece and the beginning of the next have enough."""
        for sign, enough in (("\n", 2), ("-", 3), ("*", 3), ("`", 3)):
            ends, begins = len(left) - len(left.rstrip(sign)), len(right) - len(right.lstrip(sign))
            if ends and begins and min(ends, 3) + min(begins, 3) >= enough:
                return sign
        return ""

    if at and (sign := over(pieces[at - 1], here)) and not here.strip(sign):
        found.append(1)
    if (sign := over(here, after)) and after.strip(sign):
        found.append(1)
    return min(found)


@given(st.lists(st.sampled_from(LONG), min_size=1, max_size=12))
def test_breaks_between_pieces(pieces: list[str]) -> None:
    both, own = breaks(torch.tensor([break_codes(pieces)]))
    assert both[0].tolist() == [naive(pieces, at, True) for at in range(len(pieces))]
    assert own[0].tolist() == [naive(pieces, at, False) for at in range(len(pieces))]


def test_no_cut_of_a_real_text_is_inside_of_a_word() -> None:
    """Unless all that a chunk may be cut at lies inside of words; where any delimiter counts, many are."""
    tokenizer = ModelSource.locate(None).tokenizer()
    ids = tokenizer(Path(__file__).read_text(encoding="utf-8"))["input_ids"]
    pieces = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    word, cuts = re.compile(r"\w"), Cuts(0, 8, 16)

    def inside(at: int) -> bool:
        return bool(word.match(pieces[at - 1][-1:]) and word.match(pieces[at][:1]))

    found = {}
    for codes in (break_codes, anywhere):
        feed = TokenHistory(delimiter_table(tokenizer, codes))
        feed.record(0, len(ids), 1, torch.tensor([ids]), None)
        table = ChunkTable(cuts, feed, 1, len(ids), torch.device("cpu"))
        table.take_in([Intake(0, 0, 0, len(ids))])
        found[codes] = table.edges[0, : int(table.counts[0]) + 1].tolist()
    for start, stop in pairwise(found[break_codes]):
        assert not inside(stop) or all(inside(at) for at in range(start + cuts.shortest, start + cuts.longest))
    assert sum(map(inside, found[break_codes][1:])) < sum(map(inside, found[anywhere][1:]))
