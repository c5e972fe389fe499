"""Where text breaks: delimiter levels of vocabulary pieces."""

from __future__ import annotations

import pytest

from saccade.text.levels import delimiter_levels

PIECES = {
    0: ["--", "**", "``", "{", "[", "<", "word", "", "-", "\u00a0"],
    1: ["\n\n", ".\n\n", "\r\n\r\n", "---", "***", "```", "```python", "}", " ]", "/>"],
    2: [".", "?", "!", "。", "？", "！", "\n", "\r\n", "\n ", "3.14"],
    3: [",", ";", ":", "，", "；", "：", "、", ", "],
    4: [" word", "\t"],
}


@pytest.mark.parametrize(("piece", "level"), [(piece, level) for level, pieces in PIECES.items() for piece in pieces])
def test_level_of_a_piece(piece: str, level: int) -> None:
    assert delimiter_levels([piece]) == [level]


def test_levels_keep_the_vocabulary_order() -> None:
    assert delimiter_levels(iter(["a", ".", "}", " ", ","])) == [0, 2, 1, 4, 3]
