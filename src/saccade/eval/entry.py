"""What a comparison compares: policies at budgets, one entry each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..bundled import RESELECT
from ..errors import PolicyError
from ..registry import describe
from ..spec import Policy

BASELINE = "dense"


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy at one budget; becomes one row of the results."""

    policy: Policy

    @property
    def spec(self) -> str:
        return self.policy.to_spec()

    @property
    def label(self) -> str:
        """Name and options without the budget: what the rows of one policy have in common."""
        given = [part for part in self.spec.partition(":")[2].split(",") if part and not part.startswith("budget=")]
        return " ".join((self.policy.name, *given))

    @property
    def is_baseline(self) -> bool:
        return self.policy.name == BASELINE


def default_specs(bundled: bool) -> tuple[str, ...]:
    """What is compared unless the user says otherwise; the bundled model's re-selection layer is known."""
    layer = f":reselect={RESELECT}" if bundled else ""
    return (BASELINE, "streaming", "quest", f"tidal{layer}", f"less_is_more{layer}")


def parse_budgets(text: str) -> tuple[int, ...]:
    """Read `64,256`.

    Raises:
        PolicyError: for anything that is not a list of whole numbers of at least 1.
    """
    budgets = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part.isascii() or not part.isdigit() or int(part) < 1:
            raise PolicyError(f"budget {part!r} is not valid: whole numbers of tokens, at least 1, such as 64,256")
        budgets.append(int(part))
    return tuple(dict.fromkeys(budgets))


def make_entries(specs: Iterable[str], budgets: Sequence[int]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Entries for policy specs at every budget, dense first; and notes on budgets that do not apply.

    Raises:
        PolicyError: an unknown policy or option, or a value that is not valid.
    """
    entries = [Entry(Policy.from_spec(BASELINE))]
    notes = []
    for spec in specs:
        policy = Policy.from_spec(spec)
        at_budgets = [policy.with_budget(budget) for budget in budgets]
        if all(filled is policy for filled in at_budgets):
            reason = "has its own" if describe(policy.name).has_budget else "has none"
            notes.append(f"{policy}: --budget is ignored, this policy {reason}")
        entries += [Entry(filled) for filled in at_budgets]
    unique = {entry.spec: entry for entry in entries}
    return tuple(unique.values()), tuple(dict.fromkeys(notes))
