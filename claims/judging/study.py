"""One run of a claim: its model, its arms as policies, and the folder where it goes on if it was interrupted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from saccade.calibrate.ledger import Ledger
from saccade.errors import SaccadeError
from saccade.eval.entry import known
from saccade.eval.subject import Subject
from saccade.methods.policy import Policy
from saccade.methods.registry import describe
from saccade.recipes.recipe import Recipe
from saccade.recipes.resolve import beside
from saccade.types import ModelShape

from ..subject import plain_subject

SAMPLES, RESULT, PICTURE, BEGUN = "samples.jsonl", "result.json", "picture.svg", "criteria.json"
LAYER = "{layer}"
"""In an arm: every layer that could select again, an arm each."""


@dataclass(frozen=True)
class Study:
    """Where and on what a claim is measured; nothing is loaded before it is asked for.

    Attributes:
        model: as the command line names it; None: the bundled one.
        folder: of this run alone.
        threads: of decoding.
        criteria: hash of what the samples will be judged by.
        draft: whether that stands in no commit.
    """

    model: str | None
    folder: Path
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    criteria: str = ""
    draft: bool = False

    @cached_property
    def subject(self) -> Subject:
        """The model from the outside."""
        return plain_subject(self.model, self.device, self.dtype)

    @cached_property
    def loaded(self) -> Any:
        """The model's weights."""
        return self.subject.load()

    @cached_property
    def recipe(self) -> Recipe | None:
        """What was found for the model."""
        source = self.subject.source
        return beside(source.location, source.decoder)

    def inside(self, name: str) -> Study:
        """The same model, not loaded again, in a folder of its own below this one."""
        inner = replace(self, folder=self.folder / name)
        vars(inner).update({kept: getattr(self, kept) for kept in ("subject", "loaded", "recipe")})
        return inner

    def policies(self, arms: Iterable[str]) -> dict[str, Policy]:
        """Arms, with `LAYER` filled in, and their policies on this model.

        What an arm does not say is what `saccade compare` would take: re-selection layers and roles of the recipe.

        Raises:
            SaccadeError: an arm that cannot be planned on this model, or runs with layers or roles that nobody has
                calibrated for it: its samples would say nothing about the method.
        """
        named = [name for arm in arms for name in _layered(arm, self.subject.shape)]
        return {name: _on(name, self.recipe, self.subject.shape) for name in named}

    def samples(self, about: Mapping[str, Any], key: Iterable[str]) -> Ledger:
        """The folder's samples, those of an interrupted run among them; `about` is what they depend on.

        Raises:
            OutputError: the folder holds another run's, or one by other criteria: whoever has seen samples could
                choose what they are judged by. Or it cannot be written.
        """
        subject = self.subject
        model = {"model": subject.source.name, "weights": subject.shape.weights, "dtype": subject.dtype_name}
        return Ledger(self.folder / SAMPLES, {**model, "criteria": self.criteria, "draft": self.draft, **about}, key)

    def environment(self, texts: str, seed: int) -> dict[str, Any]:
        """Machine, versions and model."""
        return self.subject.conditions(self.loaded, document=texts, contexts=(), threads=self.threads, seed=seed)


def _layered(arm: str, shape: ModelShape) -> list[str]:
    if LAYER not in arm:
        return [arm]
    # As `saccade calibrate layers` tries them: above two dense layers and the first one that selects.
    return [arm.replace(LAYER, str(layer)) for layer in shape.full_layers[3:]]


def _on(arm: str, recipe: Recipe | None, shape: ModelShape) -> Policy:
    name, _, told = arm.partition(":")
    given = {part.partition("=")[0] for part in told.split(",")}
    # As `method_of` would say, but an arm without its roles is no policy yet.
    method = f"{name}:heads=query" if "heads=query" in told.split(",") else name
    usual = describe(name).usual(known(recipe, method))
    missing = [f"{option}={_text(value)}" for option, value in usual.options.items() if option not in given]
    policy = Policy.from_spec(f"{name}:{','.join(filter(None, (told, *missing)))}".removesuffix(":"))
    plan = policy.plan(shape)
    if plan.guessed or any("nobody calibrated" in note for note in plan.notes) or (missing and not usual.calibrated):
        raise SaccadeError(
            f"arm {arm} is not valid: nobody has calibrated {policy} for this model; "
            "make a recipe beside it with `saccade calibrate`"
        )
    return policy


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
