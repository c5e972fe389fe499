"""What conversations say to a model with real weights: packages' sources with codes told in them, a question a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy

from lab.packages import stretches
from saccade.checkpoints.load import ModelSource
from saccade.errors import SaccadeError
from saccade.eval.context import ANSWER_TOKENS
from saccade.eval.facts import Fact, is_right, make_facts, question, sentence
from saccade.eval.tokens import encode

MOST_TURNS = 400
"""Of which each is asked for a code of its own: there are some 800 names."""
Tokens = tuple[int, ...]
Lengths = tuple[tuple[int, int], ...]
"""Of a conversation: tokens of each prompt and of its answer."""


@dataclass(frozen=True, slots=True)
class Script:
    """One conversation.

    Attributes:
        messages: tokens that are new in each prompt; the last ones ask for a code that was told before them.
        asked: that code, turn by turn.
    """

    tokenizer: Any
    messages: tuple[Tokens, ...]
    asked: tuple[Fact, ...]

    def right(self, turn: int, answer: Sequence[int]) -> bool:
        """Whether an answer begins with the code."""
        return is_right(self.tokenizer.decode(answer[:ANSWER_TOKENS]), self.asked[turn])


@cache
def scripts_of(model: str, conversations: tuple[Lengths, ...], shared: int) -> tuple[Script, ...]:
    """A script for each of several conversations, whose first prompts have so many tokens in common.

    The first message tells as many codes as there are turns, every other one tells one; none is asked for twice.

    Raises:
        SaccadeError: if a turn has no room for what it tells and asks; if the model has fewer positions, no weights or
            no tokenizer, or packages hold less text.
    """
    source = ModelSource.locate(model)
    tokenizer, (_, positions) = source.tokenizer(), source.shape()
    longest, count = max(sum(one[-1]) for one in conversations), len(conversations)
    common, *own = stretches(tokenizer, longest, count + 1, count, positions)
    draws = (numpy.random.default_rng([count, number]) for number in range(count))
    return tuple(
        _script(tokenizer, (*common[:shared], *words[shared:]), shared, lengths, rng)
        for words, lengths, rng in zip(own, conversations, draws, strict=True)
    )


def _script(tokenizer: Any, words: Tokens, shared: int, lengths: Lengths, rng: numpy.random.Generator) -> Script:
    """The conversation that says these words; no code is told among the first ones, which it shares with others."""
    line_ends = {token for token in set(words) if "\n" in tokenizer.decode([token])}
    codes = iter(make_facts(2 * len(lengths) - 1, rng, "eval"))
    said, known, asked, messages = 0, list[Fact](), list[Fact](), list[Tokens]()
    for turn, (prompt, answer) in enumerate(lengths):
        known += (told := [next(codes) for _ in range(1 if turn else len(lengths))])
        asked.append(known.pop(rng.integers(len(known))))
        lines = [encode(tokenizer, f"# {sentence(one)}\n") for one in told]
        ending = encode(tokenizer, question(asked[-1]))
        room, first = prompt - said - len(ending) - sum(map(len, lines)), 1 if turn else max(1, shared)
        if room < first + len(lines):
            raise SaccadeError(
                f"turn {turn + 1} of {len(lengths)}: {prompt - said} new tokens, {0 if turn else shared} of them "
                f"shared, are too few to tell {len(lines)} codes and to ask for one"
            )
        text, words, said = words[:room], words[room:], prompt + answer
        # As a comment, behind a line where one follows.
        places = [
            next((end for end in range(place, room) if text[end - 1] in line_ends), place)
            for place in sorted(rng.integers(first, room, len(lines)).tolist())
        ]
        cuts = zip([0, *places], [*places, room], [*lines, ending], strict=True)
        messages.append(tuple(chain.from_iterable((*text[a:b], *line) for a, b, line in cuts)))
    return Script(tokenizer, tuple(messages), tuple(asked))
