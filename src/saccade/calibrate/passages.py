"""What the probe reads: passages of the user's texts, or of library modules on which nothing here was trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..adapters.hf.probe import TIMES, Passage
from ..errors import DocumentError, SaccadeError
from ..eval.document import library_sources, package_sources, read_document
from ..eval.tokens import TokenizedText

BUILT_IN = "held-out modules of Python's library, and packages where these end"
_CHARACTERS, _FILES = 8, 100
"""Of a token, at most, where the built-in text is cut to size; and of packages, that are read at once."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Where passages come from: a file, a folder of files, or None: the built-in text; `length` tokens each.

    A text with fewer tokens is one passage, if it has `least` of them.
    """

    path: Path | None
    length: int
    least: int

    @classmethod
    def of(cls, path: Path | None, context: int, budgets: Sequence[int], positions: int) -> Texts:
        """Texts in which budgets tell something; or a SaccadeError, if `context` or the model has no room for them."""
        least = max(TIMES * max(budgets), Passage(()).shortest)
        if not least <= context <= positions:
            raise SaccadeError(
                f"--context {context} is not valid: the probe reads texts of {least:,} tokens or more, {TIMES} times "
                f"the largest budget; the model has {positions:,} positions"
            )
        return cls(path, context, least)

    @property
    def name(self) -> str:
        """What results call them."""
        return BUILT_IN if self.path is None else str(self.path)

    def sha256(self, passages: Sequence[Passage]) -> str:
        """Of the passages' tokens, the first digits."""
        return hashlib.sha256(repr([one.tokens for one in passages]).encode()).hexdigest()[:16]

    def passages(self, tokenizer: Any, count: int) -> list[Passage]:
        """At most `count`, none of which shares a token with another, spread over all there are.

        Raises:
            DocumentError: a text that cannot be read or is empty, or none that is long enough.
        """
        found, longest = list[Passage](), 0
        for text in self._read(count):
            if self.path is None and len(found) >= count:
                break
            whole = TokenizedText.of(tokenizer, text)
            start, longest = whole.start, max(longest, len(whole.tokens))
            body, step = whole.tokens[start:], self.length - start
            for first in range(0, len(body), step):
                tokens = (*whole.tokens[:start], *body[first : first + step])
                if len(tokens) == self.length or (first == 0 and len(tokens) >= self.least):
                    found.append(Passage(tokens, start))
        if not found:
            told = f"the probe needs {self.least:,}: longer texts, or a smaller budget"
            raise DocumentError(f"{self.name} has {longest:,} tokens at a stretch; {told}")
        count = min(count, len(found))
        return [found[place * len(found) // count] for place in range(count)]

    def _read(self, count: int) -> Iterator[str]:
        if self.path is None:
            yield library_sources(held_out=True, characters=2 * count * self.length * _CHARACTERS)
            sources = package_sources()
            while text := "".join(islice(sources, _FILES)):
                yield text
        elif self.path.is_dir():
            found = sorted(self.path.rglob("*"))
            files = [one for one in found if one.is_file() and "/." not in f"/{one.relative_to(self.path).as_posix()}"]
            if not files:
                raise DocumentError(f"folder {str(self.path)!r} holds no texts")
            yield from map(read_document, files)
        else:
            yield read_document(self.path)
