"""The built-in text that needles are hidden in."""

from __future__ import annotations

from typing import Any

import numpy

from ..eval.document import library_sources
from ..eval.tokens import token_ends

CHARACTERS = 3_000_000


class Corpus:
    """A text, whose length is in tokens.

    Attributes:
        ends: where each of these ends, in characters.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.ends = numpy.array(token_ends(tokenizer, text), dtype=int)

    @classmethod
    def library(cls, tokenizer: Any) -> Corpus:
        """Held-out modules of the standard library."""
        return cls(tokenizer, library_sources(held_out=True, characters=CHARACTERS)[:CHARACTERS])

    def __len__(self) -> int:
        return len(self.ends)

    def stretch(self, begin: int, length: int) -> str:
        """The characters of `length` tokens behind token `begin`."""
        return self.text[self.ends[begin] : self.ends[begin + length]]
