"""What a comparison compares: policies at budgets, one entry each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..checkpoints.load import ModelSource
from ..errors import PolicyError
from ..methods.method import Known
from ..methods.options import DEFAULT_BUDGET
from ..methods.policy import Policy
from ..methods.registry import policies as registered
from ..recipes.recipe import Recipe
from ..recipes.resolve import beside, resolve_all

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


def policies_for(
    written: Sequence[str], source: ModelSource, methods: Sequence[str] | None = None
) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """What the user has named, or else every method (those of `methods`) with what was found for the model; and notes.

    Raises:
        PolicyError: no policy, no recipe, or one of another model.
    """
    if written:
        return resolve_all(written, source.location, source.decoder)
    return usual_policies(beside(source.location, source.decoder), methods)


def known(recipe: Recipe | None) -> Known:
    """What methods may know of a model."""
    return Known() if recipe is None else Known(recipe.reselect, recipe.roles)


def usual_policies(
    recipe: Recipe | None, methods: Iterable[str] | None = None
) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """Every method that is compared unless the user says otherwise, or the named ones, with what a recipe knows."""
    table = registered()
    names = [name for name, method in table.items() if method.compared] if methods is None else methods
    usual = {name: table[name].usual(known(recipe)) for name in names}
    notes = tuple(f"{name}: {one.note}" for name, one in usual.items() if one.note is not None)
    return tuple(Policy.create(name, one.options) for name, one in usual.items()), notes


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


def make_entries(specs: Iterable[str | Policy], budgets: Sequence[int]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Entries for policies or their specs at every budget, dense first; and notes on budgets that do not apply.

    A budget of the list that is too small for a policy leaves that entry out; the note names the smallest one.

    Raises:
        PolicyError: an unknown policy or option, a value that is not valid, or no budget that suits any policy.
    """
    entries = [Entry(Policy.from_spec(BASELINE))]
    notes: list[str] = []
    refused: list[PolicyError] = []
    for spec in specs:
        policy = spec if isinstance(spec, Policy) else Policy.from_spec(spec)
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
