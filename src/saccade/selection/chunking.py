"""Where text is cut: delimiter levels of vocabulary pieces, and the greedy cut that ends chunks at the strongest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import PolicyError

# LycheeCluster, table 4, strongest first. Newlines of Windows are made plain before.
_LEVELS = (
    re.compile(r"\n\n|---|\*\*\*|```|[}\]>]"),
    re.compile(r"[.?!。？！\n]"),
    re.compile(r"[,;:，；：、]"),
    re.compile(r"[ \t]"),
)
_NONE = len(_LEVELS) + 1
"""Stands for level 0 where levels are compared: weaker than all."""


def delimiter_levels(pieces: Iterable[str]) -> list[int]:
    """The level of the strongest delimiter anywhere in each piece of text: 1 strongest .. 4, 0 none.

    1 is structure (blank line, Markdown rule or fence, closing bracket), 2 the end of a sentence or line, 3 the end of
    a phrase, 4 a space or tab (LycheeCluster, appendix B). Pieces are decoded text, not a vocabulary's byte spelling.
    """
    return [_level(piece.replace("\r\n", "\n")) for piece in pieces]


def cut(levels: Sequence[int] | None, length: int, minimum: int, maximum: int) -> list[int]:
    """Lengths of the chunks that a stretch of `length` tokens is cut into; a rest below `minimum` is left over.

    A chunk has `minimum` to `maximum` tokens and ends with its last token of the strongest level among those where it
    may end, without one as late as it can (LycheeCluster, section 4.3). Without `levels` (of all tokens, as
    `delimiter_levels` gives them) every chunk has `maximum` tokens; a shorter rest of `minimum` or more is one too.

    Raises:
        PolicyError: `minimum` and `maximum` are not 1 <= minimum <= maximum, or the levels are too few.
    """
    if not 1 <= minimum <= maximum:
        raise PolicyError(f"chunks of {minimum} to {maximum} tokens: the shortest has 1 and is not above the longest")
    if levels is None:
        whole, rest = divmod(length, maximum)
        return [maximum] * whole + ([rest] if rest >= minimum else [])
    if len(levels) < length:
        raise PolicyError(f"levels of {len(levels)} tokens cannot cut a stretch of {length}")
    ranks = bytes(level or _NONE for level in levels)
    lengths = []
    start = 0
    while length - start >= minimum:
        window = ranks[start + minimum - 1 : min(start + maximum, length)]
        strongest = min(window)
        last = len(window) - 1 if strongest == _NONE else window.rindex(strongest)
        lengths.append(minimum + last)
        start += minimum + last
    return lengths


def _level(piece: str) -> int:
    return next((level for level, delimiter in enumerate(_LEVELS, 1) if delimiter.search(piece)), 0)
