"""What was found for a model, beside it or in the user's cache: layers for policies that lack theirs."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..checkpoints.load import ModelSource
from ..checkpoints.shape import stored_hash
from ..errors import PolicyError
from ..methods.policy import Policy
from ..plans.identity import refuse_other
from ..types import ModelShape
from .published import MARK, PREFIX, for_model, published
from .recipe import Recipe, method_of
from .resolve import beside


def cache() -> Path:
    """The user's folder for what takes long to make."""
    return Path(os.environ.get("SACCADE_CACHE") or "~/.cache/saccade").expanduser()


def searched(policy: Policy) -> Policy:
    """What its layer depends on, written in one way: the budget is said, other defaults and rectification are not."""
    given = policy.options.model_dump(exclude_defaults=True, exclude={"reselect", "rectify"})
    found = Policy.create(policy.name, given)
    return found if policy.budget is None else found.with_budget(policy.budget)


def kept_at(shape: ModelShape, policy: Policy) -> Path | None:
    """Where the recipe of a model and policy is kept; None for a model without a hash of its weights."""
    name = f"{shape.weights}-{searched(policy).to_spec().replace(':', '-')}.json"
    return None if shape.weights is None else cache() / "recipes" / name


def keep(recipe: Recipe, policy: Policy) -> Path | None:
    """Keep what was found for a policy where `kept_at` says; an OSError or OutputError if it cannot be written."""
    path = kept_at(recipe.model, policy)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        recipe.write(path)
    return path


def already_found(policy: Policy, model: str, shape: ModelShape) -> tuple[Policy, str] | None:
    """The policy with layers of the recipe beside the model, or else of the one that is kept; and a note on which.

    One that has the method's own goes first. None without either. One whose layers are dense under this policy is none,
    nor is a kept one that is broken or another model's; that beside the model is then a PolicyError.
    """
    lies, path = beside(model, lambda: shape) if model else None, kept_at(shape, policy)
    recipes = [(lies, f"the recipe beside {model}")]
    with suppress(PolicyError):
        if path is not None:
            recipes.append((Recipe.read(path), str(path)))
    method = method_of(policy)
    for recipe, where in sorted(recipes, key=lambda one: one[0] is None or method not in one[0].layers):
        with suppress(PolicyError):
            if recipe is not None and (layers := recipe.layers_of(method)) is not None:
                refuse_other(where, recipe.model, shape)
                found = with_layers(policy, layers)
                found.plan(shape)
                return found, f"{policy}: layers {[*layers]} of {where} select again"
    return None


def lacks_layer(policy: Policy) -> bool:
    """Whether it selects again at a layer and names none."""
    return policy.options.model_dump().get("reselect", ()) is None


def with_layers(policy: Policy, layers: Sequence[int]) -> Policy:
    """The policy with these re-selection layers."""
    return replace(policy, options=policy.options.model_copy(update={"reselect": tuple(layers)}))


def known(model: str) -> tuple[str, str]:
    """What is found for a model, a folder or hub id, and what to do about what is not; "": nothing.

    Raises:
        ModelFolderError: a folder that is missing or cannot be read.
    """
    source, make = ModelSource.locate(model, weights=False), f"saccade calibrate layers --model {model} makes one"
    try:
        recipe = beside(source.location, source.decoder)
        name = for_model(source.location, source.decoder) if recipe is None else None
    except PolicyError as error:
        return str(error), make
    kept = []
    for path in sorted((cache() / "recipes").glob(f"{stored_hash(source.location)}-*.json")):
        with suppress(PolicyError):  # a broken one is passed over, as when it is looked for
            kept.append(f"kept in {path}: layers {_layers(Recipe.read(path))}")
    told = f"none beside {model}" + (f"; auto takes {PREFIX}{name}, {published(name).policy}, {MARK}" if name else "")
    found = bool(kept)
    if recipe is not None:
        layers, roles = _layers(recipe), recipe.roles or "not looked for"
        told = f"{recipe.policy}; re-selection layers: {layers}; retrieval heads: {roles}"
        found = recipe.reselect is not None or bool(recipe.layers) or recipe.policy.plan(recipe.model).guessed is None
    return "; ".join((told, *kept)), "" if found else make


def _layers(recipe: Recipe) -> str:
    told = {**recipe.layers, "others" if recipe.layers else "": recipe.reselect}.items()
    words = (f"{name} {'+'.join(map(str, layers)) or 'none'}".strip() for name, layers in told if layers is not None)
    return ", ".join(words) or "not looked for"
