"""Texts that judge: stretches of installed packages' sources that share no token, on which nothing was found."""

from typing import Any

import numpy

from saccade.calibrate.problems import Corpus
from saccade.errors import DocumentError
from saccade.eval.document import package_sources
from saccade.eval.facts import sentence_ends
from saccade.eval.tokens import TokenizedText, encode, token_ends

_LEAD, _BETWEEN = 16, 256
"""Tokens in front of the sentence that a stretch begins with; and what is guessed to lie between two stretches."""
_SPARE = 1.25  # of characters: a piece of text is a little more or fewer tokens than the corpus counted


class Packages(Corpus):
    """As much of their sources as `stretches` needs."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, "")
        self._more = package_sources()

    def stretches(self, length: int, count: int, first: int) -> list[int]:
        """Where stretches of `length` tokens begin: at least `count`, or as many as there are.

        None shares a token with another, each has a sentence to its beginning, and none begins before token `first`.
        """
        starts = self._starts(length, first)
        while len(starts) < count and self._read((count - len(starts)) * (length + _BETWEEN)):
            starts = self._starts(length, first)
        return starts

    def _starts(self, length: int, first: int) -> list[int]:
        starts = list[int]()
        for sentence in numpy.searchsorted(self.ends, sentence_ends(self.text)).tolist():
            begin = max(first, sentence - _LEAD)
            if begin < sentence - 1 and begin + length < len(self):
                starts.append(begin)
                first = begin + length + 1
        return starts

    def _read(self, tokens: int) -> bool:
        """Put so many tokens of packages behind the text, or what is left; whether there was any."""
        texts, ends, size = [self.text], [self.ends], len(self.text)
        while tokens > 0 and (text := next(self._more, "")):
            ends.append(numpy.array(token_ends(self.tokenizer, text), dtype=int) + size)
            texts, tokens, size = [*texts, text], tokens - len(ends[-1]), size + len(text)
        self.text, self.ends = "".join(texts), numpy.concatenate(ends)
        return len(texts) > 1


def stretches(tokenizer: Any, length: int, count: int, seed: int, positions: int) -> list[tuple[int, ...]]:
    """Tokens of `count` texts of packages' sources, none of which overlap.

    What the tokenizer begins every text with takes the place of the first ones, so that no target moves.

    Raises:
        DocumentError: the model has fewer positions, or there are not as many texts.
    """
    if length > positions:
        raise DocumentError(f"texts of {length} tokens are not valid: the model has {positions} positions")
    corpus, room = Packages(tokenizer), int(length * _SPARE)
    starts = corpus.stretches(room, count, int(numpy.random.default_rng(seed).integers(room)))
    if len(starts) < count:
        raise DocumentError(f"{count} texts of {length} tokens: the packages hold {len(starts)}")
    beginning = TokenizedText.of(tokenizer, "").tokens
    texts = (encode(tokenizer, corpus.stretch(start, room))[:length] for start in starts[:count])
    return [(*beginning, *text[len(beginning) :]) for text in texts]
