"""Contexts: long texts as tokens, with facts hidden in them, and the questions put to them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from ..errors import DocumentError
from .benchmark import benchmark_row, framed, is_benchmark, read_rows
from .document import language_reference, read_document
from .facts import Fact, is_right, make_facts, question, sentence, sentence_ends
from .output import grouped
from .ruler import RULER, ruler_rows
from .tokens import TokenizedText, encode, token_ends, with_facts

QUESTIONS_PER_CONTEXT = 12
FACTS_PER_CONTEXT = 24
ANSWER_TOKENS = 8
"""Longest answer in tokens; it ends earlier at a full stop, a new line or the end-of-sequence token."""

BUILT_IN = "Python language reference (held-out topics)"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context.

    Attributes:
        tokens: the question and the beginning of its answer.
        asked, expected: question and answer for people to read.
        score: how right an answer is, 0 to 1.
        longest: tokens of an answer at most.
        value_span: first token and the one behind the last that hold the answer in the context; None if unknown.
        depth: where the answer lies, 0 (first token of the context) to 1 (last); None if unknown.
        sentence: an answer ends at a full stop or a new line too.
    """

    tokens: tuple[int, ...]
    asked: str
    expected: str
    score: Callable[[str], float] = field(compare=False)
    longest: int
    value_span: tuple[int, int] | None = None
    depth: float | None = None
    sentence: bool = False

    def heard(self, tokenizer: Any, said: Sequence[int]) -> tuple[str, bool]:
        """An answer's first tokens as text, and whether they are all: by the last, their number or a sentence's end."""
        ended = said[-1] == tokenizer.eos_token_id
        text = str(tokenizer.decode(said[:-1] if ended else said))
        sentence = self.sentence and ("." in text or "\n" in text.lstrip())
        return text.strip(), ended or len(said) == self.longest or sentence


@dataclass(frozen=True, slots=True)
class Context:
    """A text that is prefilled once, and the questions about it."""

    tokens: tuple[int, ...]
    questions: tuple[Question, ...]


def built_in_contexts(tokenizer: Any, *, length: int, limit: int, positions: int, seed: int) -> list[Context]:
    """Stretches of the held-out language reference, at least `length` tokens each, with `limit` questions in all.

    Raises:
        DocumentError: if the text has too few tokens for that, the model too few positions, or the facts no room.
    """
    text = language_reference(held_out=True)
    ends = token_ends(tokenizer, text)
    if length > len(ends):
        raise DocumentError(f"--context {length}: the built-in document has only {len(ends)} tokens; pass --document")
    stops = sentence_ends(text)
    shares = _shares(limit)
    contexts = []
    for number, asked in enumerate(shares):
        # Stretches are spread over the text; they overlap when they are longer together than it is.
        first = (len(ends) - length) * number // max(len(shares) - 1, 1)
        begin = ends[first - 1] if first else 0
        # Some of the text is tables and grammar: a whole sentence first makes sure that there is a place for facts.
        sentences_before = bisect_right(stops, begin)
        if sentences_before:
            begin = max(stops[sentences_before - 1] - 200, 0)
        rng = numpy.random.default_rng([seed, number])
        contexts.append(_built_in(tokenizer, text[begin:], length, asked, rng))
    return _fitting(contexts, f"--context {length}", positions)


def document_contexts(tokenizer: Any, document: Path, *, limit: int, positions: int, seed: int) -> list[Context]:
    """The whole document, once for every dozen questions, each time with other facts in it.

    Raises:
        DocumentError: a document that is absent, empty, not UTF-8, has no sentence end or does not fit the model.
    """
    text = read_document(document)
    name = f"document {str(document)!r}"
    contexts = []
    for number, asked in enumerate(_shares(limit)):
        rng = numpy.random.default_rng([seed, number])
        contexts.append(_with_facts(tokenizer, text, make_facts(FACTS_PER_CONTEXT, rng, "eval"), asked, rng, name))
    return _fitting(contexts, name, positions)


def benchmark_contexts(
    tokenizer: Any, path: Path, *, metric: str | None, limit: int, positions: int, length: int, seed: int
) -> tuple[list[Context], int]:
    """The first `limit` rows of a file, or of `ruler` of a `length`, a context's together; and how many rows there are.

    Raises:
        DocumentError: what `benchmark_row` refuses, another kind of file, or a row that does not fit the model.
    """
    found = ruler_rows(tokenizer, length, limit, seed) if str(path) == RULER else read_rows(path)
    if not is_benchmark(found):
        raise DocumentError(f"{found[0][0]} has neither answer_prefix nor max_new_tokens; saccade tune reads those")
    contexts = []
    checked = (benchmark_row(*one, metric) for one in found[:limit])
    for text, rows in grouped(checked, lambda row: row.context).items():
        begun, after, whole = framed(tokenizer, text)
        tokens = encode(tokenizer, begun) if whole else TokenizedText.of(tokenizer, begun).tokens
        asked = []
        for row in rows:
            own = encode(tokenizer, row.question + after + row.answer_prefix)
            needed = len(tokens) + len(own) + row.max_new_tokens
            if needed > positions:
                raise DocumentError(f"{row.name}: {needed} tokens with its answer; the model has {positions} positions")
            asked.append(Question(own, row.question, ", ".join(row.answers), row.score, row.max_new_tokens))
        contexts.append(Context(tokens, tuple(asked)))
    return contexts, len(found)


def _fitting(contexts: list[Context], name: str, positions: int) -> list[Context]:
    """The contexts, if the model has positions enough for the longest one with a question and its answer."""
    longest = max(len(context.tokens) for context in contexts)
    needed = longest + ANSWER_TOKENS + max(len(q.tokens) for context in contexts for q in context.questions)
    if needed > positions:
        raise DocumentError(
            f"{name}: {longest} tokens with the facts in it, {needed} with a question and its answer; "
            f"the model has {positions} positions"
        )
    return contexts


def _shares(limit: int) -> list[int]:
    """Questions per context, `limit` in all."""
    whole, rest = divmod(limit, QUESTIONS_PER_CONTEXT)
    return [QUESTIONS_PER_CONTEXT] * whole + ([rest] if rest else [])


def _built_in(tokenizer: Any, text: str, length: int, asked: int, rng: numpy.random.Generator) -> Context:
    facts = make_facts(FACTS_PER_CONTEXT, rng, "eval")
    ends = token_ends(tokenizer, text)
    kept = max(length - sum(len(encode(tokenizer, f" {sentence(fact)}")) for fact in facts), 1)
    state = rng.bit_generator.state
    # Token counts do not add up exactly where sentences are inserted, so a short text is made a little longer.
    while True:
        rng.bit_generator.state = state
        stretch = text[: ends[min(kept, len(ends)) - 1]]
        context = _with_facts(tokenizer, stretch, facts, asked, rng, f"--context {length}")
        if len(context.tokens) >= length or kept >= len(ends):
            return context
        kept += length - len(context.tokens)


def _with_facts(
    tokenizer: Any, text: str, facts: Sequence[Fact], asked: int, rng: numpy.random.Generator, name: str
) -> Context:
    """The text with the facts hidden in it, `asked` of them asked for; `name` is what errors call the text."""
    try:
        hidden, spans = with_facts(tokenizer, text, facts, rng)
    except ValueError as error:
        raise DocumentError(f"{name}: {error}") from error
    by_depth = sorted(range(len(facts)), key=lambda index: spans[index])
    # Every other fact or so: the questions are spread over all depths, whatever their number.
    chosen = [by_depth[(2 * number + 1) * len(by_depth) // (2 * asked)] for number in range(asked)]
    questions = []
    for index in rng.permutation(chosen):
        fact, depth = facts[index], (spans[index][0] - hidden.start) / len(hidden.offsets)
        told = f"What is the code of the {fact.key}?", fact.value, partial(is_right, fact=fact), ANSWER_TOKENS
        questions.append(Question(encode(tokenizer, question(fact)), *told, spans[index], depth, sentence=True))
    return Context(hidden.tokens, tuple(questions))
