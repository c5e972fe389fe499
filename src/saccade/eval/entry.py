"""What a comparison compares: policies at budgets, one entry each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..checkpoints.load import ModelSource
from ..errors import PolicyError
from ..methods.options import DEFAULT_BUDGET
from ..methods.policy import Policy
from ..recipes.recipe import Recipe
from ..recipes.resolve import beside, resolve_all
from .output import whole_numbers

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


def policies_for(
    written: Sequence[str], source: ModelSource, methods: Sequence[str] | None = None
) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """What the user has named, or else every method (those of `methods`) with what was found for the model; and notes.

    Raises:
        PolicyError: no policy, no recipe, or one of another model.
    """
    if written:
        return resolve_all(written, source.location, source.decoder)
    recipe = beside(source.location, source.decoder)
    made = {policy.name: policy for policy in map(Policy.from_spec, default_specs(recipe))}
    chosen = {name: made[name] for name in methods or made}
    calibrated = recipe is not None and recipe.roles is not None
    return tuple(chosen.values()), (STAND_IN,) if "lychee_decode" in chosen and not calibrated else ()


def default_specs(recipe: Recipe | None) -> tuple[str, ...]:
    """What is compared unless the user says otherwise: every method, with what the recipe beside the model knows.

    `tidal` and `less_is_more` select again at its layers, `lychee_decode` has its retrieval heads. Where it has none,
    whole layers stand in: layer 0, as in the paper, and `tidal`'s; or each fourth layer of a model without a recipe.
    """
    layer, roles = "", "every:4"
    if recipe is not None and recipe.reselect is not None:
        layer = f":reselect={'+'.join(map(str, recipe.reselect))}"
        roles = f"layers:{'+'.join(map(str, sorted({0, 2, *recipe.reselect})))}"
    if recipe is not None and recipe.roles is not None:
        roles = recipe.roles
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
        SaccadeError: for anything that is not a list of whole numbers of at least 1.
    """
    return whole_numbers("budget", text, at_least=1)


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
