"""Where text breaks: in front of and behind the pieces of a vocabulary, and how strongly."""

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

# LycheeCluster, table 4, strongest first. Newlines of Windows are made plain before.
_LEVELS = (
    re.compile(r"\n\n|---|\*\*\*|```|[}\]>]"),
    re.compile(r"\.(?=\s*\Z)|[?!。？！\n]"),
    re.compile(r"[,;:，；：、·]"),
    re.compile(r"[ \t]"),
)
Codes: TypeAlias = Callable[[Iterable[str]], list[int]]
BESIDE = len(_LEVELS) + 1
WEAKEST = BESIDE + 1
"""Inside of a word: weaker than all."""
# What cannot be decoded is part of a letter.
_WORD = re.compile(r"[\w\ufffd]")
# What a run of is level 1: two newlines, three of the others.
_RUN = r"([\n\-*`])\1*"


def break_codes(pieces: Iterable[str]) -> list[int]:
    """Of each piece of text, what `breaks` reads: how text breaks around it (LycheeCluster, appendix B).

    Level 1 is structure (blank line, Markdown rule or fence, closing bracket), 2 the end of a sentence or line, 3 the
    end of a phrase, 4 a space or tab; 5, ours, any other sign, 0 a word that may go on. Text breaks behind a delimiter
    that no word follows within its piece, and in front of one that no word precedes. Pieces are decoded text, not a
    vocabulary's byte spelling.

    Returns numbers: three bits for the level behind a piece, three for that in front of it, and five each for kind and
    length of the run of newlines, dashes ... that it begins and that it ends with.
    """
    return [_code(piece.replace("\r\n", "\n")) for piece in pieces]


def breaks(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Levels int32 `[n, w]` of the breaks behind tokens of these codes `[n, w]`, 1 .. WEAKEST; a negative one has none.

    The second result are those that a token and the one in front of it make, whatever follows.
    """
    codes = codes.int().clamp(min=0)
    behind, front, begins, ends = codes & 7, codes >> 3 & 7, codes >> 6 & 31, pad(codes >> 11, (1, -1))
    # A run over two pieces ends where the second does, or else lies between them.
    joined = (begins >> 2 == ends >> 2) & ((begins & 3) + (ends & 3) >= torch.where(begins >> 2 == 1, 2, 3))
    whole = begins == codes >> 11
    own = torch.where(joined & whole, 1, behind)
    next_front = pad(torch.where(joined & ~whole, 1, front), (-1, 1))
    own, next_front = (torch.where(level > 0, level, WEAKEST) for level in (own, next_front))
    return torch.minimum(own, next_front), own


def _code(piece: str) -> int:
    behind, front = (BESIDE * bool(sign and not _WORD.match(sign)) for sign in (piece[-1:], piece[:1]))
    for level, delimiter in reversed(list(enumerate(_LEVELS, 1))):
        for found in delimiter.finditer(piece):
            before, after = piece[: found.start()], piece[found.end() :]
            # A space belongs to what it stands in front of.
            if after.strip() if level == 4 else _WORD.search(after):
                front = front if (before.strip() if level == 4 else _WORD.search(before)) else level
            else:
                behind = level
    runs = (re.match(_RUN, piece), re.search(_RUN + r"\Z", piece))
    first, last = ((one and ("\n-*`".index(one[1]) + 1) * 4 + min(len(one[0]), 3)) or 0 for one in runs)
    return behind | front << 3 | first << 6 | last << 11
