"""What a comparison compares: policies at budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..checkpoints.load import ModelSource
from ..errors import PolicyError
from ..methods.options import DEFAULT_BUDGET
from ..methods.policy import Policy
from ..recipes.recipe import Recipe
from ..recipes.resolve import beside, resolve_all
from .output import whole_numbers

BASELINE = "dense"

STAND_IN = "lychee_decode: whole layers stand in for its retrieval heads, which nobody has calibrated for this model"


def label(policy: Policy) -> str:
    """Name and options without the budget: what the rows of one policy have in common."""
    given = str(policy).partition(":")[2].split(",")
    return " ".join((policy.name, *(part for part in given if part and not part.startswith("budget="))))


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
    """Read `64,256`; see `whole_numbers`."""
    return whole_numbers("budget", text, at_least=1)


def at_budgets(policies: Iterable[str | Policy], budgets: Sequence[int]) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """Policies or their specs at every budget, dense first; and notes on budgets that do not apply.

    A budget of the list that is too small for a policy is left out; the note names the smallest one.

    Raises:
        PolicyError: an unknown policy or option, a value that is not valid, or no budget that suits any policy.
    """
    found = [Policy.from_spec(BASELINE)]
    notes: list[str] = []
    refused: list[PolicyError] = []
    for written in policies:
        policy = written if isinstance(written, Policy) else Policy.from_spec(written)
        if policy.with_budget(DEFAULT_BUDGET) is policy:
            reason = "has its own" if policy.options.budgeted else "has none"
            notes.append(f"{policy}: --budget is ignored, this policy {reason}")
            found.append(policy)
            continue
        for budget in budgets:
            filled = _at_budget(policy, budget)
            if isinstance(filled, PolicyError):
                refused.append(filled)
                notes.append(f"left out: {filled}")
            else:
                found.append(filled)
    if refused and all(policy.name == BASELINE for policy in found):
        raise refused[0]
    return tuple({policy.to_spec(): policy for policy in found}.values()), tuple(dict.fromkeys(notes))


def _at_budget(policy: Policy, budget: int) -> Policy | PolicyError:
    """The policy at a budget, or why it cannot work with that."""
    try:
        return policy.with_budget(budget)
    except PolicyError as error:
        return error
