"""What a comparison compares: policies at budgets."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..adapters.hf.support import against_rewinding
from ..checkpoints.load import ModelSource
from ..errors import PolicyError
from ..methods.method import Known
from ..methods.options import DEFAULT_BUDGET
from ..methods.policy import Policy
from ..methods.registry import policies as registered
from ..plans.cost import cache_read
from ..recipes.kept import already_found
from ..recipes.recipe import Recipe
from ..recipes.resolve import beside, resolve_all
from ..types import ModelShape, Role
from .output import whole_numbers

BASELINE = "dense"


def policies_for(
    written: Sequence[str], source: ModelSource, methods: Sequence[str] | None = None
) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """What the user has named, or else every method (those of `methods`) with what was found for the model; and notes.

    Methods that the model's layers rule out, or whose layer nobody has found, are left out, with the reason in a note,
    unless they are named: then that is a PolicyError, as what is no policy and no recipe, or one of another model.
    """
    if written:
        policies, notes = resolve_all(written, source.location, source.decoder)
        found = [with_known_layers(policy, source) for policy in policies]
        return tuple(policy for policy, _ in found), (*notes, *(note for _, note in found if note))
    shape, recipe = source.decoder(), beside(source.location, source.decoder)
    usual, notes = usual_policies(recipe, methods)
    reasons = {one: why for one in usual if (why := against_rewinding(one, shape) or _unknown(one, source))}
    able = tuple(policy for policy in usual if policy not in reasons)
    return able, (*notes, *(f"left out: {reason}" for reason in reasons.values()))


def with_known_layers(policy: Policy, source: ModelSource) -> tuple[Policy, str]:
    """A policy that needs a layer with the one that was found for the model, and where from; others as they are.

    Raises:
        PolicyError: nobody has found one.
    """
    shape = source.decoder()
    if policy.plan(shape).guessed is None or against_rewinding(policy, shape):
        return policy, ""
    found = already_found(policy, source.location, shape)
    if found is None:
        model = source.name if source.bundled else source.location
        command = f"saccade calibrate layers --model {model} --policy {policy.name}"
        raise PolicyError(f"{policy}: no layer is known for {model}; `{command}` finds it, or name one, reselect=LAYER")
    return found


def _unknown(policy: Policy, source: ModelSource) -> str | None:
    try:
        with_known_layers(policy, source)
    except PolicyError as error:
        return str(error)
    return None


def known(recipe: Recipe | None, method: str) -> Known:
    """What a method may know of a model."""
    return Known() if recipe is None else Known(recipe.layers_of(method), recipe.roles, recipe.model.full_layers[:3])


def usual_policies(
    recipe: Recipe | None, methods: Iterable[str] | None = None
) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """Every method that is compared unless the user says otherwise, or the named ones, with what a recipe knows."""
    table = registered()
    names = [name for name, method in table.items() if method.compared] if methods is None else methods
    usual = {name: table[name].usual(known(recipe, name)) for name in names}
    notes = tuple(f"{name}: {one.note}" for name, one in usual.items() if one.note is not None)
    return tuple(Policy.create(name, one.options) for name, one in usual.items()), notes


def terms_of(policy: Policy, shape: ModelShape, context: int) -> dict[str, Any]:
    """On which terms a policy is compared: what its sets hold in any case, its dense layers, what it reads.

    `frame`: first and last tokens, None where its index decides; `cache_read`: of the cache, with index and dense
    passes, over what dense attention reads.
    """
    plan = policy.plan(shape)
    frame = None if plan.selector is None else plan.selector.frame(context)
    dense = sum(not any(role is not Role.DENSE for role in plan.roles.layers[layer]) for layer in shape.full_layers)
    return {"frame": frame, "dense_layers": dense, "cache_read": cache_read(plan, policy.rectify, shape, context)}


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
            filled = at_budget(policy, budget)
            if isinstance(filled, PolicyError):
                refused.append(filled)
                notes.append(f"left out: {filled}")
            else:
                found.append(filled)
    if refused and all(policy.name == BASELINE for policy in found):
        raise refused[0]
    return tuple({policy.to_spec(): policy for policy in found}.values()), tuple(dict.fromkeys(notes))


def at_budget(policy: Policy, budget: int) -> Policy | PolicyError:
    """The policy at a budget, or why it cannot work with that."""
    try:
        return policy.with_budget(budget)
    except PolicyError as error:
        return error
