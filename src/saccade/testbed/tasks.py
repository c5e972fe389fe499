"""What the model is trained on: generators of rows in which the answers are supervised."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from saccade.eval.document import language_reference, library_sources
from saccade.eval.facts import Fact, make_facts, question, sentence, sentence_ends
from saccade.testbed.tokenizer import END

Generator = numpy.random.Generator
Tokens = Sequence[int]
AFTER_ANSWER = 0.3  # weight of the token that follows an answer


@dataclass
class Row:
    """Tokens, the weight with which each is supervised as an answer, and whether it is plain text."""

    tokens: list[int] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    prose: list[bool] = field(default_factory=list)

    def add(self, tokens: Tokens, weight: float = 0.0, prose: bool = False) -> None:
        """Append `tokens`, all supervised with `weight`."""
        self.tokens += tokens
        self.answers += [weight] * len(tokens)
        self.prose += [prose] * len(tokens)


@dataclass(frozen=True)
class Query:
    """A prompt and its answer, both as text; the answer ends with its full stop."""

    prompt: str
    answer: str


class TaskMaker:
    """Makes rows of a given length, from text that is encoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.vocabulary = len(tokenizer)
        (self.end,) = self.encode(END)
        self.sentences = [
            self._sentences(language_reference().train),
            self._sentences(library_sources(characters=2_000_000)),
        ]
        self.tasks: dict[str, Callable[[int, Generator], Row]] = {
            "skip": lambda length, rng: self.skip(length, rng, (1, 2, 3, 4, 5)),
            "skip1": lambda length, rng: self.skip(length, rng, (1,)),
            "skip2": lambda length, rng: self.skip(length, rng, (2,)),
            "skip3": lambda length, rng: self.skip(length, rng, (3,)),
            "recall": self.recall,
            "copy": self.copy,
            "compact": lambda length, rng: self.facts(length, rng, "compact"),
            "sentence": lambda length, rng: self.facts(length, rng, "sentence"),
            "question": lambda length, rng: self.facts(length, rng, "question"),
            "listing": lambda length, rng: self.facts(length, rng, "listing"),
            "alias": self.alias,
            "prose": self.prose,
        }

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`."""
        return list(self.backend.encode(text).ids)

    def _sentences(self, text: str) -> list[list[int]]:
        ends = [0, *sentence_ends(text), len(text)]
        pieces = [text[begin:end] for begin, end in pairwise(ends)]
        return [list(e.ids) for e in self.backend.encode_batch(pieces) if e.ids]

    def _background(self, length: int, rng: Generator) -> list[Tokens]:
        """Consecutive sentences of one source, `length` tokens in all; the first one is cut to fit."""
        source = self.sentences[int(rng.random() < 0.3)]
        start, chosen, total = int(rng.integers(len(source))), list[Tokens](), 0
        while total < length:
            chosen.append(source[start % len(source)])
            total += len(chosen[-1])
            start += 1
        if chosen:
            chosen[0] = chosen[0][total - length :] if total - length < len(chosen[0]) else []
            surplus = sum(map(len, chosen)) - length
            if surplus > 0:
                chosen[-1] = chosen[-1][:-surplus]
        return chosen

    def _with_questions(self, length: int, statements: Iterable[str], queries: Sequence[Query], rng: Generator) -> Row:
        """Statements among the sentences of a text, then the queries in random order."""
        ending = Row()
        for index in rng.permutation(len(queries)):
            begin = len(ending.tokens)
            ending.add(self.encode(queries[index].prompt))
            if begin:
                ending.answers[begin] = AFTER_ANSWER
            ending.add(self.encode(queries[index].answer), 1.0)
        ending.add([self.end], AFTER_ANSWER)
        stated = [self.encode(statement) for statement in statements]
        room = length - len(ending.tokens) - sum(map(len, stated))
        background = self._background(max(room, 0), rng)
        slots = numpy.sort(rng.integers(0, len(background) + 1, size=len(stated)))
        row, done = Row(), 0
        for slot, index in zip(slots, rng.permutation(len(stated)), strict=True):
            for piece in background[done:slot]:
                row.add(piece, prose=True)
            row.add(stated[index])
            done = int(slot)
        for piece in background[done:]:
            row.add(piece, prose=True)
        row.tokens += ending.tokens
        row.answers += ending.answers
        row.prose += ending.prose
        return row

    def facts(self, length: int, rng: Generator, style: str) -> Row:
        """Facts with two-word keys; every one is asked for once."""
        write: Callable[[Fact], str] = sentence_in(style)
        asked: Callable[[Fact], Query] = query_in(style)
        sample = make_facts(1, rng)[0]
        cost = len(self.encode(write(sample) + asked(sample).prompt + asked(sample).answer)) + 1
        most = min(int(length * (0.95 if length < 256 else 0.7)) // cost, 96)
        count = int(numpy.exp(rng.uniform(numpy.log(max(most / (2 if length < 512 else 4), 1)), numpy.log(most + 1))))
        facts = make_facts(count, rng)
        return self._with_questions(length, [write(f) for f in facts], [asked(f) for f in facts], rng)

    def alias(self, length: int, rng: Generator) -> Row:
        """Chains: "The code of the X is the code of the Y."; X and sometimes Y are asked for."""
        most = min(int(length * 0.9) // 40, 24)
        chains = int(rng.integers(1, most + 1)) if length >= 512 else most
        facts = make_facts(2 * chains, rng)
        statements, queries = [], []
        style = "question" if rng.random() < 0.5 and length >= 512 else "sentence"
        asked = query_in(style)
        for target, name in zip(facts[:chains], facts[chains:], strict=True):
            statements += [" " + sentence(target), f" The code of the {name.key} is the code of the {target.key}."]
            queries.append(asked(Fact(name.key, target.value)))
        while sum(len(self.encode(q.prompt + q.answer)) + 1 for q in queries) + 22 * chains > length:
            queries.pop()
        return self._with_questions(length, statements, queries, rng)

    def skip(self, length: int, rng: Generator, distances: Sequence[int]) -> Row:
        """Random tokens; half of them repeat the one `k` before their predecessor, k being one of `distances`."""
        tokens = rng.integers(1, self.vocabulary, size=length)
        k = distances[int(rng.integers(len(distances)))]
        for place in numpy.flatnonzero(rng.random(length) < 0.5):
            if place > k:
                tokens[place] = tokens[place - 1 - k]
        row = Row()
        row.add([int(t) for t in tokens], 0.5)
        return row

    def recall(self, length: int, rng: Generator) -> Row:
        """Random keys of one to three tokens with values of one or two; then the keys in another order."""
        key_size, value_size = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        size = key_size + value_size + 1
        count = min(int(numpy.exp(rng.uniform(numpy.log(3), numpy.log(length // (2 * size))))), 128)
        words = rng.permutation(self.vocabulary - 1)[: max(6, count // 2) if key_size > 1 else count] + 1
        seen: dict[tuple[int, ...], list[int]] = {}
        while len(seen) < count:
            key = tuple(int(w) for w in rng.choice(words, key_size))
            if key_size == 1:
                key = (int(words[len(seen)]),)
            seen.setdefault(key, [int(v) for v in rng.integers(1, self.vocabulary, value_size)])
        pairs, stop = list(seen.items()), self.encode("\n")
        junk = [int(t) for t in rng.integers(1, self.vocabulary, length - 2 * size * count)]
        cuts = [0, *sorted(int(c) for c in rng.integers(0, len(junk) + 1, count)), len(junk)]
        row = Row()
        for index, begin, until in zip(rng.permutation(count), cuts, cuts[1:], strict=False):
            row.add(junk[begin:until])
            row.add([*pairs[index][0], *pairs[index][1], *stop])
        row.add(junk[cuts[-2] :])
        for index in rng.permutation(count):
            row.add(pairs[index][0])
            row.add(pairs[index][1], 1.0)
            row.add(stop)
        return row

    def copy(self, length: int, rng: Generator) -> Row:
        """Segments of random tokens that come again later, in another order, from their third token on."""
        size = int(rng.integers(8, 33))
        count = max(1, min(length // (3 * size), 24))
        words = rng.permutation(self.vocabulary - 1)[: max(size, 64)] + 1
        segments = [[int(w) for w in rng.choice(words, size)] for _ in range(count)]
        background = [t for piece in self._background(length - 2 * size * count, rng) for t in piece]
        cut = int(rng.integers(0, len(background) + 1))
        row = Row()
        for segment in segments:
            row.add(segment)
        row.add(background[:cut], prose=True)
        for index in rng.permutation(count):
            row.add(segments[index][:3])
            row.add(segments[index][3:], 0.5)
        row.add(background[cut:], prose=True)
        return row

    def prose(self, length: int, rng: Generator) -> Row:
        """Plain text."""
        row = Row()
        for piece in self._background(length, rng):
            row.add(piece, prose=True)
        return row


def sentence_in(style: str) -> Callable[[Fact], str]:
    """How a style states a fact."""
    if style == "compact":
        return lambda fact: f" {fact.key} {fact.value}."
    if style == "listing":
        return lambda fact: f'\n    "{fact.key}": {fact.value},'
    return lambda fact: " " + sentence(fact)


def query_in(style: str) -> Callable[[Fact], Query]:
    """How a style asks for a fact."""
    if style == "compact":
        return lambda fact: Query(f" {fact.key}", f" {fact.value}.")
    if style == "listing":
        return lambda fact: Query(f'\ndata["{fact.key}"] =', f" {fact.value}\n")
    if style == "sentence":
        return lambda fact: Query(f" The code of the {fact.key} is", f" {fact.value}.")
    return lambda fact: Query(question(fact), f" {fact.value}.")
