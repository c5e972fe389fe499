"""Passages of held-out text that end at the same tokens however far back they begin (ReSA, section 3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from saccade.errors import DocumentError
from saccade.eval.document import language_reference, library_sources
from saccade.eval.facts import hide, make_facts, question, sentence
from saccade.eval.tokens import TokenizedText, encode

REFERENCE, LIBRARY, FACTS = "reference", "library", "facts"
SOURCES = (REFERENCE, LIBRARY, FACTS)
"""Where passages come from: the language reference, modules of the standard library, and the reference with facts
hidden in it and a question about one of them, with its answer, at the end. Nothing of it was trained on."""

MOST_FACTS = 8
_TOKENS_PER_FACT = 128
_TRIES = 50
_SLACK = 16  # tokens that joining pieces of text may add


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens of a text, `longest + 1` of them.

    Attributes:
        source: one of `SOURCES`.
        number: which passage of its source.
        tokens: without special ones.
        beginning: those that the tokenizer begins every text with.
    """

    source: str
    number: int
    tokens: tuple[int, ...]
    beginning: tuple[int, ...] = ()

    def cut(self, length: int) -> tuple[int, ...]:
        """The last `length` tokens; the beginning takes the place of the first of them, so that no target moves."""
        kept = self.tokens[-length:]
        return (*self.beginning, *kept[len(self.beginning) :])


def held_out_passages(
    tokenizer: Any, sources: Sequence[str], *, count: int, shortest: int, longest: int, seed: int
) -> list[Passage]:
    """`count` passages of every source, with ends spread over its text; the last tokens of no two are the same.

    Raises:
        DocumentError: an unknown source, or one that is shorter than the passages.
    """
    passages = []
    for source in sources:
        if source not in SOURCES:
            raise DocumentError(f"unknown source {source!r}; valid: {', '.join(SOURCES)}")
        rng = numpy.random.default_rng([seed, SOURCES.index(source)])
        text = (
            library_sources(held_out=True, characters=10**9) if source == LIBRARY else language_reference(held_out=True)
        )
        encoded = TokenizedText.of(tokenizer, text)
        ids, offsets = encoded.tokens[encoded.start :], encoded.offsets
        room = len(ids) - longest - 1
        if room < count:
            raise DocumentError(f"{count} passages of {longest} tokens: the {source} has only {len(ids)} tokens")
        for number in range(count):
            tokens = None
            for _ in range(_TRIES):
                # One end in every stretch of the text, at random within it.
                end = longest + 1 + int(room * (number + rng.random()) / count)
                if source == FACTS:
                    tokens = _with_facts(tokenizer, text, offsets[:end], shortest, longest, rng)
                else:
                    tokens = ids[end - longest - 1 : end]
                if tokens is not None:
                    break
            else:
                raise DocumentError(f"passages of {shortest} tokens: no place where a sentence ends to hide facts at")
            passages.append(Passage(source, number, tokens, encoded.tokens[: encoded.start]))
    return passages


def _with_facts(
    tokenizer: Any,
    text: str,
    offsets: Sequence[tuple[int, int]],
    shortest: int,
    longest: int,
    rng: numpy.random.Generator,
) -> tuple[int, ...] | None:
    """Text up to the last of `offsets`, facts hidden in what the shortest passage holds of it, question and answer.

    None if no sentence ends there, as in tables.
    """
    facts = make_facts(max(1, min(MOST_FACTS, shortest // _TOKENS_PER_FACT)), rng, "eval")
    asked = facts[int(rng.integers(len(facts)))]
    ending = [*encode(tokenizer, question(asked)), *encode(tokenizer, f" {asked.value}.")]
    added = len(ending) + sum(len(encode(tokenizer, f" {sentence(fact)}")) for fact in facts) + _SLACK
    near, far = shortest - added, longest + 1
    if near < _TOKENS_PER_FACT:
        raise DocumentError(f"passages of {shortest} tokens have no room for facts; the shortest has {added + 128}")
    begin = offsets[-near][0]
    try:
        hidden, _ = hide(text[begin : offsets[-1][1]], facts, rng)
    except ValueError:
        return None
    before = text[offsets[-far][0] : begin]
    return (*encode(tokenizer, before + hidden), *ending)[-far:]
