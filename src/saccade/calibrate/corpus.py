"""The built-in texts that needles are hidden in, and stretches that do not overlap."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy

from ..eval.document import library_sources, package_sources
from ..eval.facts import sentence_ends
from ..eval.tokens import token_ends

CHARACTERS = 3_000_000
_LEAD, _BETWEEN = 16, 256
"""Tokens in front of the sentence that a stretch begins with; and what is guessed to lie between two stretches."""


class Corpus:
    """Held-out modules of the standard library, or `packages`, as much of them as `stretches` needs.

    Packages are what judges: their stretches are in no text on which anything was trained or found. The length is in
    tokens.
    """

    def __init__(self, tokenizer: Any, *, packages: bool) -> None:
        self._tokenizer, self._more = tokenizer, package_sources()
        self._text = "" if packages else library_sources(held_out=True, characters=CHARACTERS)[:CHARACTERS]
        self._ends = numpy.array(token_ends(tokenizer, self._text), dtype=int)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def sha256(self) -> str:
        """Of the text as far as it was read, the first digits."""
        return hashlib.sha256(self._text.encode("utf-8", "replace")).hexdigest()[:16]

    def stretch(self, begin: int, length: int) -> str:
        """The characters of `length` tokens behind token `begin`."""
        return self._text[self._ends[begin] : self._ends[begin + length]]

    def stretches(self, length: int, count: int, first: int) -> list[int]:
        """Where stretches of `length` tokens of packages begin: at least `count`, or as many as there are.

        None shares a token with another, each has a sentence to its beginning, and none begins before token `first`.
        """
        starts = self._starts(length, first)
        while len(starts) < count and self._read((count - len(starts)) * (length + _BETWEEN)):
            starts = self._starts(length, first)
        return starts

    def _starts(self, length: int, first: int) -> list[int]:
        starts = list[int]()
        for sentence in numpy.searchsorted(self._ends, sentence_ends(self._text)).tolist():
            begin = max(first, sentence - _LEAD)
            if begin < sentence - 1 and begin + length < len(self):
                starts.append(begin)
                first = begin + length + 1
        return starts

    def _read(self, tokens: int) -> bool:
        """Put so many tokens of packages behind the text, or what is left; whether there was any."""
        texts, ends, size = [self._text], [self._ends], len(self._text)
        while tokens > 0 and (text := next(self._more, "")):
            ends.append(numpy.array(token_ends(self._tokenizer, text), dtype=int) + size)
            texts, tokens, size = [*texts, text], tokens - len(ends[-1]), size + len(text)
        self._text, self._ends = "".join(texts), numpy.concatenate(ends)
        return len(texts) > 1
