"""From what a user writes to a policy: a policy, a spec, `auto`, a recipe's file, or a published recipe."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.hub import find
from ..errors import PolicyError
from ..files import short
from ..methods.policy import Policy
from ..methods.registry import policies
from ..plans.identity import refuse_other
from ..types import ModelShape
from .published import PREFIX, for_model, note, published
from .recipe import NAME, Recipe

AUTO = "auto"

FALLBACK = "less_is_more"
"""What decodes a model without a recipe when a policy is needed and none is named; its plan says what it guesses."""

PolicyLike = Policy | str | os.PathLike[str]
"""How a policy may be asked for."""

Shape = Callable[[], ModelShape]
"""The model's shape, with the hash of its weights where they are at hand; called only where it decides something."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A policy for a model, and what the user should know about where it comes from."""

    policy: Policy
    notes: tuple[str, ...] = ()


def read(written: object) -> Policy | Recipe:
    """What was asked for, all but `auto`, which needs the model.

    Raises:
        PolicyError: what is none of the others, or cannot be read.
    """
    if isinstance(written, Policy):
        return written
    if isinstance(written, str):
        if written.startswith(PREFIX):
            return published(written.removeprefix(PREFIX))
        name, colon, _ = written.partition(":")
        if not written.endswith(".json") or (colon and name in policies()):  # a spec may end with a role file
            return Policy.from_spec(written)
    elif not isinstance(written, os.PathLike):
        raise PolicyError(
            f"policy={short(written)} is neither a Policy, a spec string nor the path of a recipe; a spec is such as "
            "'tidal:budget=64'"
        )
    return Recipe.read(Path(written).expanduser())


def resolve(written: object, model: str, shape: Shape) -> Chosen:
    """The policy that was asked for (see `PolicyLike`), for this model: a folder or hub id, as far as it is known.

    Raises:
        PolicyError: nothing that could be a policy; a recipe of another model, with both fingerprints; or `auto` where
            there is no recipe, or more than one.
    """
    if written == AUTO:
        written = _found_for(model, shape)
    given = read(written)
    if isinstance(given, Policy):
        return Chosen(given)
    name = written.removeprefix(PREFIX) if isinstance(written, str) and written.startswith(PREFIX) else None
    refuse_other(f"recipe {Path(str(written)).expanduser()}" if name is None else str(written), given.model, shape())
    return Chosen(given.policy, () if name is None else (note(name),))


def resolve_all(written: Iterable[object], model: str, shape: Shape) -> tuple[tuple[Policy, ...], tuple[str, ...]]:
    """Several policies as `resolve` finds them, and the notes on all of them."""
    chosen = [resolve(one, model, shape) for one in written]
    return tuple(one.policy for one in chosen), tuple(note for one in chosen for note in one.notes)


def default(model: str, shape: Shape) -> Chosen:
    """The policy where one is needed and none was asked for: that of the recipe beside the model, if there is one.

    Raises:
        PolicyError: that recipe cannot be read or is another model's.
    """
    recipe = beside(model, shape)
    return Chosen(Policy.from_spec(FALLBACK) if recipe is None else recipe.policy)


def beside(model: str, shape: Shape) -> Recipe | None:
    """The recipe in the model's folder or hub repository; None if there is none.

    Raises:
        PolicyError: it cannot be read or is another model's.
    """
    path = find(model, NAME, download=True)
    if path is None:
        return None
    recipe = Recipe.read(path)
    refuse_other(f"recipe {path}", recipe.model, shape())
    return recipe


def _found_for(model: str, shape: Shape) -> Path | str:
    """What `auto` stands for: the recipe beside the model, or the one that was published for it."""
    path = find(model, NAME, download=True)
    if path is not None:
        return path
    name = for_model(model, shape) if model else None
    if name is not None:
        return PREFIX + name
    called, example = (repr(model), model) if model else ("without a name", "DIR_OR_HUB_ID")
    raise PolicyError(
        f"policy 'auto': no recipe for model {called}: no {NAME} beside it, and none published for its name and sizes "
        f"(saccade policies --recipes); make one with `saccade calibrate layers --model {example}` or "
        f"`saccade tune --model {example}` and --recipe beside it, or name a policy"
    )
