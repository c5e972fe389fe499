"""Problems with answers that a program checks, as reasoning-gym makes them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from saccade.errors import SaccadeError

REQUIREMENTS = "claims/reasoning/requirements.txt"
ASKED = "\n\nThink step by step. End with one line that begins with 'Answer:' and holds the answer alone."
ANSWER = "Answer:"
FAMILIES = (
    "aiw", "base_conversion", "basic_arithmetic", "binary_alternation", "bitwise_arithmetic", "caesar_cipher",
    "calendar_arithmetic", "chain_sum", "coin_flip", "complex_arithmetic", "count_bits", "count_primes",
    "course_schedule", "decimal_chain_sum", "family_relationships", "fraction_simplification", "gcd", "group_anagrams",
    "isomorphic_strings", "knights_knaves", "lcm", "leg_counting", "letter_counting", "letter_jumble",
    "number_filtering", "number_sequence", "number_sorting", "polynomial_equations", "power_function",
    "prime_factorization", "products", "ransom_note", "shortest_path", "simple_equations",
    "simple_geometry", "spell_backward", "string_insertion", "string_splitting", "syllogism", "time_intervals",
    "word_sequence_reversal", "word_sorting",
)  # fmt: skip
"""Arithmetic, algebra, strings, graphs and logic in words; none with pictures, code or grids."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One of a family's, and the score 0..1 of an answer to it."""

    name: str
    question: str
    score: Callable[[str], float]

    def right(self, said: str) -> bool:
        """Whether what stands behind the last `ANSWER` is the answer."""
        _, mark, behind = said.rpartition(ANSWER)
        line = behind.strip().partition("\n")[0].lstrip(" *`$").rstrip(" *`$.")
        try:
            return bool(mark and line) and self.score(line) >= 1
        except Exception:  # of a family that cannot read what a model wrote
            return False


def problems_of(each: int, seed: int) -> list[Problem]:
    """So many of every family, family by family.

    Raises:
        SaccadeError: reasoning-gym is not there.
    """
    try:
        create_dataset = import_module("reasoning_gym").create_dataset
    except ModuleNotFoundError as error:
        raise SaccadeError(f"{error.name} is missing: pip install --requirement {REQUIREMENTS}") from None
    found = []
    for family in FAMILIES:
        made = create_dataset(family, size=each, seed=seed)
        for number in range(each):
            entry = made[number]
            score = partial(made.score_answer, entry=entry)
            found.append(Problem(f"{family} {number}", entry["question"] + ASKED, score))
    return found
