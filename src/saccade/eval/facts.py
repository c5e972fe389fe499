"""The retrieval task: facts hidden in a long text, and questions about them.

Text only, and no model: training, the demo and every evaluation share these sentences.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal

import numpy

Split = Literal["train", "eval"]

ADJECTIVES: tuple[str, ...] = tuple(
    """amber ancient azure bitter bold brave bright broken calm clever cold copper coral cosmic crimson
    curious dusty eager early fancy fierce foggy fresh frozen gentle giant golden grand green happy heavy
    hidden hollow humble ivory jolly kind lazy little lonely loud lucky misty modest narrow noble pale
    proud purple quiet rapid royal rusty sandy scarlet secret sharp shiny silent silver sleepy smooth
    velvet wild""".split()
)
NOUNS: tuple[str, ...] = tuple(
    """anchor apple badger basket beacon bear bishop bottle bridge candle canyon castle cedar comet
    compass cradle crow desert dolphin dragon eagle falcon farmer ferry forest fountain fox garden
    glacier guitar hammer harbor hawk island jaguar kettle ladder lantern lemon lion marble meadow mirror
    monkey mountain needle orchard otter palace panther parrot pepper pigeon planet rabbit river rocket
    saddle salmon sparrow temple tiger violin wagon""".split()
)

_HELD_OUT = 5  # one key in five, by the sum of its words' indices, belongs to the eval split
_BOUNDARY = re.compile(r"(?<=[a-z)`][.])(?=\s)")


@dataclass(frozen=True)
class Fact:
    """A two-word key and its value of four digits."""

    key: str
    value: str


def sentence(fact: Fact) -> str:
    return f"The code of the {fact.key} is {fact.value}."


def question(first: Fact, *others: Fact) -> str:
    """A question and, as in RULER, the beginning of its answer, which restates the first key."""
    keys = ", of the ".join(fact.key for fact in (first, *others))
    return f"\n\nQuestion: What is the code of the {keys}?\nAnswer: The code of the {first.key} is"


def make_facts(count: int, rng: numpy.random.Generator, split: Split = "train") -> list[Fact]:
    """`count` facts with different keys, which share their words so that both words of a key matter."""
    share = 1 / _HELD_OUT if split == "eval" else 1 - 1 / _HELD_OUT
    for side in range(min(len(NOUNS), ceil(sqrt(1.5 * count / share)) + 1), len(NOUNS) + 1):
        adjectives = rng.permutation(len(ADJECTIVES))[:side]
        nouns = rng.permutation(len(NOUNS))[:side]
        pairs = [(a, n) for a in adjectives for n in nouns if ((a + n) % _HELD_OUT == 0) == (split == "eval")]
        if len(pairs) >= count:
            chosen = rng.permutation(len(pairs))[:count]
            values = rng.integers(1000, 10000, size=count)
            return [
                Fact(f"{ADJECTIVES[pairs[i][0]]} {NOUNS[pairs[i][1]]}", str(value))
                for i, value in zip(chosen, values, strict=True)
            ]
    raise ValueError(f"the {split} split has too few keys for {count} facts")


def sentence_ends(text: str) -> list[int]:
    """The offsets just behind the sentences of `text`, where another sentence can be inserted."""
    return [match.start() for match in _BOUNDARY.finditer(text)]


def hide(
    text: str, facts: Sequence[Fact], rng: numpy.random.Generator, state: Callable[[Fact], str] = sentence
) -> tuple[str, list[tuple[int, int]]]:
    """Insert the facts' sentences, in random order, behind sentences spread evenly over the text; `state` writes them.

    Returns the new text and, fact by fact, the character span (begin, end) of its sentence; a ValueError if no sentence
    ends in the text.
    """
    ends = sentence_ends(text)
    if not ends:
        raise ValueError("the text has no sentence behind which facts could be hidden")
    parts: list[str] = []
    spans: dict[int, tuple[int, int]] = {}
    length = done = 0
    for slot, chosen in enumerate(rng.permutation(len(facts))):
        offset = ends[min(bisect_left(ends, (slot + rng.random()) / len(facts) * len(text)), len(ends) - 1)]
        stated = state(facts[chosen])
        parts += [text[done:offset], " ", stated]
        begin = length + offset - done + 1
        length, done = begin + len(stated), offset
        spans[int(chosen)] = (begin, length)
    parts.append(text[done:])
    return "".join(parts), [spans[i] for i in range(len(facts))]


def is_right(answer: str, fact: Fact) -> bool:
    """Whether the generated answer begins with the value and nothing that would change it follows."""
    return re.match(rf"\s*{fact.value}(?!\d)", answer) is not None
