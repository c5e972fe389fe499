"""Texts as tokens, and which tokens hold a part of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.random import Generator

from .facts import Fact, hide, sentence


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text's tokens behind those that the tokenizer begins every text with, such as a beginning-of-sequence token.

    Attributes:
        start: how many of those there are.
        ends: characters of the text that each token begins and ends at, those at the start left out.
    """

    tokens: tuple[int, ...]
    start: int
    offsets: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> TokenizedText:
        # The length warning does not apply: what is too long is refused or cut.
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        start = _beginning(tokenizer)
        return cls((*start, *encoded["input_ids"]), len(start), encoded["offset_mapping"])

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """First token that ends behind character `begin`, and the first one that starts at or behind `end`."""
        first = next(index for index, offset in enumerate(self.offsets) if offset[1] > begin)
        behind = (index for index in range(first, len(self.offsets)) if self.offsets[index][0] >= end)
        return first + self.start, next(behind, len(self.offsets)) + self.start


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of what follows another text; no special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def token_ends(tokenizer: Any, text: str) -> list[int]:
    """The characters of a text that its tokens end before."""
    return [end for _, end in TokenizedText.of(tokenizer, text).offsets]


def with_facts(
    tokenizer: Any, text: str, facts: Sequence[Fact], rng: Generator, state: Callable[[Fact], str] = sentence
) -> tuple[TokenizedText, list[tuple[int, int]]]:
    """A text with facts hidden in it, and which tokens hold each one's value; see `hide`."""
    hidden, spans = hide(text, facts, rng, state)
    held = TokenizedText.of(tokenizer, hidden)
    values = (hidden.index(fact.value, *span) for fact, span in zip(facts, spans, strict=True))
    return held, [held.span(at, at + len(fact.value)) for fact, at in zip(facts, values, strict=True)]


def _beginning(tokenizer: Any) -> tuple[int, ...]:
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    for count in range(len(with_special)):
        if with_special[count : count + len(plain)] == plain:
            return tuple(with_special[:count])
    return ()
