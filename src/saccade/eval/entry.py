"""What a comparison compares: policies at budgets, one entry each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..bundled import RESELECT
from ..errors import PolicyError
from ..options import DEFAULT_BUDGET
from ..spec import Policy

BASELINE = "dense"

STAND_IN = "lychee_decode: whole layers stand in for its retrieval heads, which nobody has calibrated for this model"


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
    """What is compared unless the user says otherwise: every method, with what is known of the bundled model.

    That is the layer where it looks things up. `tidal` and `less_is_more` select again there; `lychee_decode` has no
    role file yet, so whole layers stand in for its retrieval heads: layer 0, as in the paper, and `tidal`'s two. That
    is a quarter of all heads, as with each fourth layer of a model of which nothing is known.
    """
    layer = f":reselect={RESELECT}" if bundled else ""
    roles = f"layers:0+2+{RESELECT}" if bundled else "every:4"
    return (
        BASELINE,
        "streaming",
        "quest",
        f"tidal{layer}",
        f"less_is_more{layer}",
        f"lychee_decode:roles={roles}",
        "lychee_cluster",
        "resa",
        "exact_topk",
    )


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

    A budget of the list that is too small for a policy leaves that entry out; the note names the smallest one.

    Raises:
        PolicyError: an unknown policy or option, a value that is not valid, or no budget that suits any policy.
    """
    entries = [Entry(Policy.from_spec(BASELINE))]
    notes: list[str] = []
    refused: list[PolicyError] = []
    for spec in specs:
        policy = Policy.from_spec(spec)
        if policy.with_budget(DEFAULT_BUDGET) is policy:
            reason = "has its own" if policy.options.budgeted else "has none"
            notes.append(f"{policy}: --budget is ignored, this policy {reason}")
            entries.append(Entry(policy))
            continue
        for budget in budgets:
            filled = _at_budget(policy, budget)
            if isinstance(filled, PolicyError):
                refused.append(filled)
                notes.append(f"left out: {filled}")
            else:
                entries.append(Entry(filled))
    if refused and all(entry.is_baseline for entry in entries):
        raise refused[0]
    unique = {entry.spec: entry for entry in entries}
    return tuple(unique.values()), tuple(dict.fromkeys(notes))


def _at_budget(policy: Policy, budget: int) -> Policy | PolicyError:
    """The policy at a budget, or why it cannot work with that."""
    try:
        return policy.with_budget(budget)
    except PolicyError as error:
        return error
