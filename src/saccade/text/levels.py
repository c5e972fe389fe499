"""Where text breaks: delimiter levels of vocabulary pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable

# LycheeCluster, table 4, strongest first. Newlines of Windows are made plain before.
_LEVELS = (
    re.compile(r"\n\n|---|\*\*\*|```|[}\]>]"),
    re.compile(r"[.?!。？！\n]"),
    re.compile(r"[,;:，；：、]"),
    re.compile(r"[ \t]"),
)
WEAKEST = len(_LEVELS) + 1
"""Stands for level 0 where levels are compared: weaker than all."""


def delimiter_levels(pieces: Iterable[str]) -> list[int]:
    """The level of the strongest delimiter anywhere in each piece of text: 1 strongest .. 4, 0 none.

    1 is structure (blank line, Markdown rule or fence, closing bracket), 2 the end of a sentence or line, 3 the end of
    a phrase, 4 a space or tab (LycheeCluster, appendix B). Pieces are decoded text, not a vocabulary's byte spelling.
    """
    return [_level(piece.replace("\r\n", "\n")) for piece in pieces]


def _level(piece: str) -> int:
    return next((level for level, delimiter in enumerate(_LEVELS, 1) if delimiter.search(piece)), 0)
