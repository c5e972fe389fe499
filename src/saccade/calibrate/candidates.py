"""What `saccade tune` tries: families of policies, each a ladder of budgets."""

from collections.abc import Iterable, Sequence

from ..adapters.hf.probe import clean
from ..adapters.hf.support import against_rewinding
from ..errors import PolicyError
from ..eval.entry import at_budget, known
from ..methods.policy import Policy
from ..methods.registry import policies as registered
from ..recipes.acceptance import Acceptance
from ..recipes.recipe import Recipe

SHARES = (4, 8, 16, 32, 64)
"""Budgets are the context divided by these, unless the user names them."""
SMALLEST = 16


def families(recipe: Recipe | None, named: Iterable[str]) -> tuple[Policy, ...]:
    """One policy per family, without its budget: those named, or every method with what the recipe knows.

    Methods that need a layer or roles which nobody has found are left out, and those that the model's layers rule out.

    Raises:
        PolicyError: a name or an option that is not valid.
    """
    specs = tuple(named)
    if specs:
        return tuple(map(Policy.from_spec, dict.fromkeys(specs)))
    made = (
        Policy.create(method.name, {**usual.options, **more})
        for found in (None, recipe)  # those that need nothing come first, whatever is known
        for method in registered().values()
        if (usual := method.usual(known(found, method.name))).calibrated
        for more in method.tuned
    )
    able = (one for one in made if recipe is None or against_rewinding(one, recipe.model) is None)
    return tuple(dict.fromkeys(able))


def rungs(family: Policy, budgets: Sequence[int], context: int) -> list[Policy]:
    """A family's candidates; budgets that are too small for it are left out. One that has its budget stays alone."""
    found = dict[str, Policy]()
    for budget in budgets:
        of_row = family.options.at_share(round(min(budget / context, 1.0), 4))
        given = {**of_row, **family.options.model_dump(exclude_unset=True)}
        made = Policy.create(family.name, given) if of_row else at_budget(family, budget)
        if not isinstance(made, PolicyError):
            found[made.to_spec()] = made
    return [*found.values()]


def served(policy: Policy, told: Iterable[Acceptance]) -> Acceptance | None:
    """What drafts say of a policy, however it is rectified; of several the one with most, since they may share some."""
    own = (one for one in told if clean(Policy.from_spec(one.policy)) == clean(policy))
    return max(own, key=lambda one: one.drafted[0], default=None)
