"""From what a user writes to a policy: a policy, a spec, `auto`, a recipe's file, or a published recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.hub import find
from ..errors import PolicyError
from ..methods.policy import Policy
from ..methods.registry import policies
from ..types import ModelShape
from .published import PREFIX, Published, for_model, published
from .recipe import NAME, Recipe

AUTO = "auto"

FALLBACK = "less_is_more"
"""What decodes a model without a recipe when a policy is needed and none is named; its plan says what it assumes."""

Written = Policy | str | os.PathLike[str]
"""How a policy may be asked for."""

Shape = Callable[[], ModelShape]
"""The model's shape, with the hash of its weights where they are at hand; called only where it decides something."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A policy for a model, and what the user should know about where it comes from."""

    policy: Policy
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A recipe, not held against a model yet; `where` starts what is said about it."""

    recipe: Recipe
    where: str
    notes: tuple[str, ...] = ()

    @classmethod
    def file(cls, path: str | Path) -> Found:
        return cls(Recipe.read(path), f"recipe {path}")

    @classmethod
    def of_paper(cls, one: Published) -> Found:
        return cls(one.recipe, f"{PREFIX}{one.name}", (one.note,))

    def checked(self, shape: ModelShape) -> Recipe:
        """The recipe.

        Raises:
            PolicyError: if it is another model's, with both fingerprints.
        """
        self.recipe.refuse_other(self.where, shape)
        return self.recipe


def read(written: object) -> Policy | Found | None:
    """What was asked for, as far as it can be told without the model; None: whatever `auto` finds.

    Raises:
        PolicyError: what is none of the five, or cannot be read.
    """
    if isinstance(written, Policy):
        return written
    if isinstance(written, os.PathLike):
        return Found.file(Path(written).expanduser())
    if not isinstance(written, str):
        raise PolicyError(f"policy={written!r} is neither a Policy, a spec string nor the path of a recipe")
    if written == AUTO:
        return None
    if written.startswith(PREFIX):
        return Found.of_paper(published(written.removeprefix(PREFIX)))
    name, colon, _ = written.partition(":")
    if written.endswith(".json") and not (colon and name in policies()):  # a spec may end with a role file
        return Found.file(Path(written).expanduser())
    return Policy.from_spec(written)


def resolve(written: object, model: str, shape: Shape) -> Chosen:
    """The policy that was asked for, for this model.

    Args:
        written: see `Written`.
        model: folder or hub id, as far as it is known.
        shape: of that model.

    Raises:
        PolicyError: nothing that could be a policy; a recipe of another model, with both fingerprints; or `auto` where
            there is no recipe, or more than one.
    """
    given = read(written)
    if isinstance(given, Policy):
        return Chosen(given)
    if given is None:
        given = _beside(model) or _of_paper(model, shape) or _refuse(model)
    return Chosen(given.checked(shape()).policy, given.notes)


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
    found = _beside(model)
    return None if found is None else found.checked(shape())


def _beside(model: str) -> Found | None:
    path = find(model, NAME, download=True)
    return None if path is None else Found.file(path)


def _of_paper(model: str, shape: Shape) -> Found | None:
    one = for_model(model, shape) if model else None
    return None if one is None else Found.of_paper(one)


def _refuse(model: str) -> Found:
    name = repr(model) if model else "without a name"
    example = model or "DIR_OR_HUB_ID"
    raise PolicyError(
        f"policy 'auto': no recipe for model {name}: no {NAME} beside it, and none published for its name and sizes "
        f"(saccade policies --recipes); make one with `saccade calibrate layers --model {example}` or "
        f"`saccade tune --model {example}`, or name a policy"
    )
