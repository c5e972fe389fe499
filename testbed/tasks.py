"""What the model is trained on: generators of rows in which the answers are supervised."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from saccade.eval.document import language_reference, library_sources
from saccade.eval.facts import Fact, make_facts, question, sentence, sentence_ends

from .tokenizer import _PATTERN, END

Generator = numpy.random.Generator
Tokens = Sequence[int]
PIECE = re.compile(_PATTERN)
STOP = 0.4  # weight of an answer's last token, its full stop or new line
AFTER_ANSWER = 0.3  # weight of the token that follows an answer
TEXT_SHARES = (0.2, 0.4, 0.4)  # of the rows: language reference, docstrings, sources


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


def encode_texts(tokenizer: PreTrainedTokenizerFast) -> dict[str, numpy.ndarray[Any, Any]]:
    """The training texts, sentence by sentence: `tokens0` and the sentences' ends `ends0`, `tokens1` and so on."""
    library = library_sources(characters=100_000_000)
    docstrings = [re.sub(r"\n[ \t]+", "\n", text) for text in re.findall(r'"""(.{80,}?)"""', library, re.DOTALL)]
    arrays = {}
    for number, text in enumerate((language_reference(), "\n\n".join(docstrings), library)):
        pieces = [text[begin:end] for begin, end in pairwise([0, *sentence_ends(text), len(text)])]
        encoded = [e.ids for e in tokenizer.backend_tokenizer.encode_batch(pieces) if e.ids]
        arrays[f"tokens{number}"] = numpy.array([t for ids in encoded for t in ids], dtype=numpy.int16)
        arrays[f"ends{number}"] = numpy.cumsum([len(ids) for ids in encoded]).astype(numpy.int32)
    return arrays


class TaskMaker:
    """Makes rows of a given length. `texts` is what `encode_texts` returns.

    Every task takes the length, a generator, and whether what is asked for must lie in the first half of the row and
    all questions in the second.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: dict[str, numpy.ndarray[Any, Any]]) -> None:
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.vocabulary = len(tokenizer)
        self.known: dict[str, list[int]] = {}
        (self.end,) = self.backend.encode(END).ids
        self.texts = [(texts[f"tokens{n}"].tolist(), [0, *texts[f"ends{n}"].tolist()]) for n in range(len(texts) // 2)]
        self.tasks: dict[str, Callable[[int, Generator, bool], Row]] = {
            "skip": partial(self.skip, distances=(1, 2, 3, 4, 5)),
            "skip1": partial(self.skip, distances=(1,)),
            "skip2": partial(self.skip, distances=(2,)),
            "skip3": partial(self.skip, distances=(3,)),
            "recall": self.recall,
            "relay": partial(self.relay, hops=2),
            "relay3": partial(self.relay, hops=3),
            "copy": self.copy,
            "compact": partial(self.facts, style="compact"),
            "sentence": partial(self.facts, style="sentence"),
            "question": partial(self.facts, style="question"),
            "listing": partial(self.facts, style="listing"),
            "alias compact": partial(self.alias, style="compact", hops=2),
            "alias sentence": partial(self.alias, style="sentence", hops=2),
            "alias question": partial(self.alias, style="question", hops=2),
            "alias3 compact": partial(self.alias, style="compact", hops=3),
            "alias3 sentence": partial(self.alias, style="sentence", hops=3),
            "alias3 question": partial(self.alias, style="question", hops=3),
            "name": partial(self.alias, style="sentence", hops=2, named=True),
            "prose": self.prose,
        }

    def encode(self, text: str) -> list[int]:
        """The token ids of a short `text`; the tokenizer's pieces are looked up, which is faster than to encode."""
        ids: list[int] = []
        for piece in PIECE.findall(text):
            if piece not in self.known:
                self.known[piece] = list(self.backend.encode(piece).ids)
            ids += self.known[piece]
        return ids

    def _background(self, length: int, rng: Generator) -> list[Tokens]:
        """Consecutive sentences of one text, `length` tokens in all, from the middle of a sentence on."""
        tokens, ends = self.texts[int(rng.choice(len(TEXT_SHARES), p=TEXT_SHARES))]
        start, chosen, room = int(rng.integers(len(ends) - 1)), list[Tokens](), length
        while room > 0:
            piece = tokens[ends[start] : ends[start + 1]]
            if not chosen:
                piece = piece[int(rng.integers(len(piece))) :]
            chosen.append(piece[:room])
            room -= len(chosen[-1])
            start = (start + 1) % (len(ends) - 1)
        return chosen

    def _with_questions(
        self, length: int, rng: Generator, half: bool, statements: Sequence[str], queries: Sequence[Query]
    ) -> Row:
        """Statements among the sentences of a text, then the queries in random order."""
        ending = Row()
        for index in rng.permutation(len(queries)):
            begin = len(ending.tokens)
            ending.add(self.encode(queries[index].prompt))
            if begin:
                ending.answers[begin] = AFTER_ANSWER
            ending.add(self.encode(queries[index].answer), 1.0)
            ending.answers[-1] = STOP
        ending.add([self.end], AFTER_ANSWER)
        stated = [self.encode(statement) for statement in statements]
        filler = max(length - length // 2 - len(ending.tokens), 0) if half else 0
        background = self._background(length - filler - len(ending.tokens) - sum(map(len, stated)), rng)
        slots = numpy.sort(rng.integers(0, len(background) + 1, size=len(stated)))
        row, done = Row(), 0
        for slot, index in zip(slots, rng.permutation(len(stated)), strict=True):
            for piece in background[done:slot]:
                row.add(piece, prose=True)
            row.add(stated[index])
            done = int(slot)
        for piece in [*background[done:], *self._background(filler, rng)]:
            row.add(piece, prose=True)
        row.tokens += ending.tokens
        row.answers += ending.answers
        row.prose += ending.prose
        return row

    def _room(self, length: int, half: bool, statements: Sequence[str], queries: Sequence[Query]) -> int:
        """How often the statements and the queries fit into a row."""
        stated = sum(len(self.encode(text)) for text in statements)
        asked = sum(len(self.encode(query.prompt + query.answer)) for query in queries)
        room = (length - 1) // 2 if half else int(length * (0.95 if length < 256 else 0.7))
        return room // max(stated, asked) if half else room // (stated + asked + 1)

    def facts(self, length: int, rng: Generator, half: bool = False, *, style: str) -> Row:
        """Facts with two-word keys; every one is asked for once."""
        write, asked = sentence_in(style), query_in(style)
        sample = make_facts(1, rng)[0]
        most = min(self._room(length, half, [write(sample)], [asked(sample)]), 96)
        least = max(most / (2 if length < 512 else 4), 1)
        facts = make_facts(int(numpy.exp(rng.uniform(numpy.log(least), numpy.log(most + 1)))), rng)
        return self._with_questions(length, rng, half, [write(f) for f in facts], [asked(f) for f in facts])

    def alias(
        self, length: int, rng: Generator, half: bool = False, *, style: str, hops: int, named: bool = False
    ) -> Row:
        """Chains of `hops` keys: all but the last have another key's name for a value.

        Each chain is asked for once, mostly by its first key. Some facts that are no chain's are asked for, too.
        `named` asks for the second key instead of the value: the first of the two steps.
        """
        write, asked = sentence_in(style), query_in(style)
        alias_of = "{}" if style == "compact" else "the code of the {}"

        def chain(facts: Sequence[Fact]) -> list[str]:
            return [write(facts[-1])] + [write(Fact(a.key, alias_of.format(b.key))) for a, b in pairwise(facts)]

        sample = make_facts(hops, rng)
        most = min(self._room(length, half, chain(sample), [asked(sample[0])]), 40)
        most = most * 2 // 3 if named else most  # its queries are longer
        chains = int(rng.integers(max(most // 4, 1), most + 1)) if most else 1
        single = int(rng.integers(0, chains // 4 + 1))
        facts = make_facts(chains * hops, rng)
        statements: list[str] = []
        queries = []
        for number in range(chains):
            members = facts[number * hops : (number + 1) * hops]
            members = members[-1:] if number < single else members
            statements += chain(members)
            first = int(rng.integers(len(members))) if rng.random() < 0.2 else 0
            if named and number >= single:
                name = f" {members[1].key}."
                queries.append(Query(f" The code of the {members[0].key} is the code of the", name))
                continue
            queries.append(asked(Fact(members[first].key, members[-1].value)))
        return self._with_questions(length, rng, half, statements, queries)

    def skip(self, length: int, rng: Generator, half: bool = False, *, distances: Sequence[int]) -> Row:
        """Random tokens; half of them repeat the one `k` before their predecessor, k being one of `distances`."""
        tokens = rng.integers(1, self.vocabulary, size=length).tolist()
        k = distances[int(rng.integers(len(distances)))]
        for place in numpy.flatnonzero(rng.random(length) < 0.5).tolist():
            if place > k:
                tokens[place] = tokens[place - 1 - k]
        row = Row()
        row.add(tokens, 0.5)
        return row

    def _lookup(
        self, length: int, rng: Generator, stated: Sequence[Tokens], asked: Sequence[tuple[Tokens, Tokens]]
    ) -> Row:
        """Statements among random tokens in the first half; in the second half keys, each with its value."""
        stop = self.encode("\n")
        ending = Row()
        for index in rng.permutation(len(asked)):
            ending.add(asked[index][0])
            ending.add(asked[index][1], 1.0)
            ending.add(stop)
        size = sum(len(tokens) + 1 for tokens in stated)
        between = max(length - length // 2 - len(ending.tokens), 0)
        junk = rng.integers(1, self.vocabulary, length - len(ending.tokens) - size).tolist()
        cuts = [0, *numpy.sort(rng.integers(0, len(junk) - between + 1, len(stated))).tolist()]
        row = Row()
        for index, (begin, until) in zip(rng.permutation(len(stated)), pairwise(cuts), strict=True):
            row.add(junk[begin:until])
            row.add([*stated[index], *stop])
        row.add(junk[cuts[-1] :])
        row.add(ending.tokens)
        row.answers[-len(ending.answers) :] = ending.answers
        return row

    def recall(self, length: int, rng: Generator, half: bool = False) -> Row:
        """Random keys of one to three tokens with values of one or two; then the keys in another order."""
        key_size, value_size = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        size = key_size + value_size + 1
        count = min(int(numpy.exp(rng.uniform(numpy.log(3), numpy.log(length // (2 * size))))), 128)
        words = rng.permutation(self.vocabulary - 1)[: max(6, count // 2) if key_size > 1 else count] + 1
        seen: dict[tuple[int, ...], list[int]] = {}
        while len(seen) < count:
            key = tuple(rng.choice(words, key_size).tolist())
            if key_size == 1:
                key = (int(words[len(seen)]),)
            seen.setdefault(key, rng.integers(1, self.vocabulary, value_size).tolist())
        return self._lookup(length, rng, [[*key, *value] for key, value in seen.items()], list(seen.items()))

    def relay(self, length: int, rng: Generator, half: bool = False, *, hops: int) -> Row:
        """Chains of random tokens: each is followed by the next one of its chain; asked for is the last."""
        most = min(length // (2 * 3 * hops), 64)
        count = int(rng.integers(max(most // 4, 1), most + 1))
        words = (rng.permutation(self.vocabulary - 1)[: count * (hops + 1)] + 1).reshape(count, hops + 1).tolist()
        stated = [list(pair) for chain in words for pair in pairwise(chain)]
        firsts = [int(rng.integers(hops)) if rng.random() < 0.2 else 0 for _ in words]
        asked = [(chain[first : first + 1], chain[-1:]) for chain, first in zip(words, firsts, strict=True)]
        return self._lookup(length, rng, stated, asked)

    def copy(self, length: int, rng: Generator, half: bool = False) -> Row:
        """Segments of random tokens that come again later, in another order, from their third token on."""
        size = int(rng.integers(8, 33))
        count = max(1, min(length // (3 * size), 24))
        words = rng.permutation(self.vocabulary - 1)[: max(size, 64)] + 1
        segments = [rng.choice(words, size).tolist() for _ in range(count)]
        background = [t for piece in self._background(length - 2 * size * count, rng) for t in piece]
        # Copies begin in the second half of the row.
        cut = int(rng.integers(max(length // 2 - size * count, 0), len(background) + 1))
        row = Row()
        for segment in segments:
            row.add(segment)
        row.add(background[:cut], prose=True)
        for index in rng.permutation(count):
            row.add(segments[index][:3])
            row.add(segments[index][3:], 0.5)
        row.add(background[cut:], prose=True)
        return row

    def prose(self, length: int, rng: Generator, half: bool = False) -> Row:
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
