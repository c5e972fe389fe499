"""Where text breaks: delimiter levels of vocabulary pieces."""

from __future__ import annotations

import pytest

from saccade.text.levels import delimiter_levels


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
