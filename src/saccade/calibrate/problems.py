"""What calibration asks: long texts with needles in them, as tokens, and the answers that a right model gives.

The texts are held-out modules of the standard library: neither the bundled model's training nor `saccade compare` reads
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy

from ..errors import DocumentError
from ..eval.document import library_sources
from ..eval.facts import ADJECTIVES, NOUNS, Fact, make_facts, question, sentence
from ..eval.tokens import encode, token_ends, with_facts

TASKS = ("kv", "listing", "passkey", "records", "several")
SHORTEST, CHARACTERS = 128, 3_000_000
PASSKEYS, PASSKEY_WORDS = 10, 32
"""LycheeDecode, appendix F: ten passkeys of 32 words each."""

RECORDS = 96
"""So many that about half of a text is records, as structured as LycheeCluster's pilot study has them (figure 2)."""

_TRIES, _SLACK = 100, 16


@dataclass(frozen=True, slots=True)
class Ask:
    """One question about a text.

    Attributes:
        prompt: the question and the beginning of its answer.
        answer: what a right answer says next.
        gold: first token of the text that holds the answer, and the one behind the last; None if unknown.
        after: what ends the answer where another question follows.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    gold: tuple[int, int] | None
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """A text that is prefilled once, and what it is asked."""

    tokens: tuple[int, ...]
    asks: tuple[Ask, ...]

    def positions(self, *, together: bool) -> int:
        """What the text takes with its longest question and answer; `together`: with all of them, as in training."""
        sizes = (len(ask.prompt) + len(ask.answer) + together * len(ask.after) for ask in self.asks)
        return len(self.tokens) + (sum if together else max)(sizes)


class Corpus:
    """A text that needles are hidden in, whose length is in tokens.

    Attributes:
        ends: where each of these ends, in characters.
    """

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.ends = numpy.array(token_ends(tokenizer, text), dtype=int)

    def __len__(self) -> int:
        return len(self.ends)

    def stretch(self, begin: int, length: int) -> str:
        """The characters of `length` tokens behind token `begin`."""
        return self.text[self.ends[begin] : self.ends[begin + length]]


class Problems(Protocol):
    """A source of problems: number `n` is always the same one."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Problem: ...


@dataclass(frozen=True, slots=True)
class Style:
    """How a task states a needle and asks for `several`; the most needles of a text, the tokens of each."""

    state: Callable[[Fact], str]
    ask: Callable[..., str]
    end: str = "."
    values: Callable[[Sequence[Fact], numpy.random.Generator], Sequence[Fact]] = lambda facts, _: facts
    most: int = 24
    tokens: int = 40
    several: int = 1


STYLES = {
    "kv": Style(sentence, question),
    "listing": Style(lambda f: f'\n    "{f.key}": {f.value},', lambda f: f'\n\ndata["{f.key}"] =', end=""),
    "passkey": Style(
        lambda f: f"The passkey of the {f.key} is {f.value}.",
        lambda f: f"\n\nQuestion: What is the passkey of the {f.key}?\nAnswer: The passkey of the {f.key} is",
        values=lambda facts, rng: [
            Fact(fact.key, " ".join(rng.choice([*ADJECTIVES, *NOUNS], PASSKEY_WORDS))) for fact in facts
        ],
        most=PASSKEYS,
        tokens=4 * PASSKEY_WORDS,
    ),
    "records": Style(
        lambda f: f'\n    {{"kind": "record", "the code of the {f.key}": {f.value}, "checked": true}},',
        question,
        most=RECORDS,
        tokens=60,
    ),
    "several": Style(sentence, question, several=3),
}


def _answer(first: Fact, *others: Fact) -> str:
    """The first one's value, and then the other sentences, each with its end but the last."""
    return ". ".join((first.value, *(sentence(other)[:-1] for other in others)))


def needles_in(task: str, length: int) -> int:
    """How many needles a text of `length` tokens holds, and so the most questions that can be put to it."""
    return max(1, min(STYLES[task].most, length // STYLES[task].tokens))


@dataclass
class NeedleProblems:
    """Needles in stretches of the held-out library, each problem made from the seed and its number.

    Attributes:
        lengths: shortest and longest text in tokens; a text's length is drawn evenly between them.
        count: how many problems there are.
        asked: questions per problem, at most as many as there are needles.
        seed: where everything random comes from.
        positions: what the model has.
        together: all questions of a text follow it at once, as in training.

    Raises:
        DocumentError: a text without room for needles, or longer than the model's positions or the library.
    """

    tokenizer: Any
    task: str
    lengths: tuple[int, int]
    count: int
    asked: int
    seed: int
    positions: int
    together: bool = False

    def __post_init__(self) -> None:
        shortest, longest = self.lengths
        if shortest < SHORTEST:
            raise DocumentError(f"--context {shortest} is not valid: texts of at least {SHORTEST} tokens")
        self.corpus = self.read()
        if longest >= len(self.corpus):
            told = f"the built-in text has only {len(self.corpus)} tokens; pass --task FILE.jsonl"
            raise DocumentError(f"--context {longest}: {told}")
        behind = self._room() * (min(self.asked, needles_in(self.task, longest)) if self.together else 1)
        refuse_too_long(longest + behind, self.positions, self._name(longest))
        for number in range(min(self.count, 3)):
            _ = self[number]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Problem:
        if not 0 <= number < self.count:
            raise IndexError(number)
        rng = numpy.random.default_rng([self.seed, TASKS.index(self.task), number])
        length = int(rng.integers(self.lengths[0], self.lengths[1] + 1))
        for _ in range(_TRIES):
            problem = self._try(length, self.begin(number, length, rng), rng)
            if problem is not None:
                refuse_too_long(problem.positions(together=self.together), self.positions, self._name(length))
                return problem
        raise DocumentError(f"--context {length}: the built-in text has no place to hide needles in")

    def read(self) -> Corpus:
        """What texts are cut from."""
        return Corpus(self.tokenizer, library_sources(held_out=True, characters=CHARACTERS)[:CHARACTERS])

    def begin(self, number: int, length: int, rng: numpy.random.Generator) -> int:
        """The token at which a text of `length` begins."""
        return int(rng.integers(0, len(self.corpus) - length))

    def _name(self, length: int) -> str:
        return f"--lengths {length}" if self.together else f"--context {length}"

    def _room(self) -> int:
        """Tokens that no question with its answer exceeds, and what joints may add to a text."""
        adjective, noun, word = (max(words, key=self._size) for words in (ADJECTIVES, NOUNS, (*ADJECTIVES, *NOUNS)))
        number = max((4 * str(digit) for digit in range(1, 10)), key=self._size)
        value = " ".join([word] * PASSKEY_WORDS) if self.task == "passkey" else number
        style = STYLES[self.task]
        sample = [Fact(f"{adjective} {noun}", value)] * style.several
        return self._size(f"{style.ask(*sample)} {_answer(*sample)}{style.end}") + _SLACK

    def _size(self, text: str) -> int:
        return len(encode(self.tokenizer, f" {text}"))

    def _try(self, length: int, begin: int, rng: numpy.random.Generator) -> Problem | None:
        style = STYLES[self.task]
        facts = style.values(make_facts(needles_in(self.task, length), rng, "eval"), rng)
        stretch = self.corpus.stretch(begin, max(length - sum(self._size(style.state(fact)) for fact in facts), 1))
        try:
            text, spans = with_facts(self.tokenizer, stretch, facts, rng, style.state)
        except ValueError:  # code without a sentence
            return None
        asks = []
        for index in rng.permutation(len(facts))[: self.asked]:
            asked = [facts[(index + further) % len(facts)] for further in range(style.several)]
            said = (style.ask(*asked), f" {_answer(*asked)}", style.end)
            prompt, answer, end = (encode(self.tokenizer, each) for each in said)
            asks.append(Ask(prompt, answer, spans[index] if style.several == 1 else None, end))
        return Problem(text.tokens, tuple(asks))


def refuse_too_long(needed: int, positions: int, name: str) -> None:
    """Raise a DocumentError naming both counts if a text with a question and its answer does not fit the model."""
    if needed > positions:
        raise DocumentError(
            f"{name}: {needed} tokens with a question and its answer; the model has {positions} positions"
        )
