"""Recipes: the policy that was found for a model, and what it rests on. JSON, beside the model or anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from ..errors import PolicyError
from ..files import Kept, Record, Version, short
from ..methods.policy import Policy
from ..plans.identity import ModelRecord, to_dict
from ..types import ModelShape
from .machine import versions

NAME = "saccade.json"
"""What a recipe is called beside its model's configuration."""


class _Record(Record):
    version: Version
    model: ModelRecord
    policy: str = Field(description="a spec")
    reselect: tuple[int, ...] | None = Field(description="a list of layers, or null")
    roles: str | None = Field(description="heads:L+L.H, layers:N+N or null")
    found: dict[str, Any] = Field(description="an object that says how the recipe was found")
    scores: dict[str, Any] = Field(description="an object that says what was measured")
    versions: dict[str, str] = Field(description="an object that says which software found it, versions as text")
    layers: dict[str, tuple[int, ...]] = Field(default={}, description="an object of lists of layers, by method")


def method_of(policy: Policy) -> str:
    """Whom a list of layers is for: the method, and its `heads` unless there is a set for each KV head."""
    heads = policy.options.model_dump().get("heads", "kv")
    return policy.name if heads == "kv" else f"{policy.name}:heads={heads}"


@dataclass(frozen=True)
class Recipe(Kept):
    """What calibration found for one model.

    Attributes:
        model, policy: whom it is for, and what to decode with.
        reselect: re-selection layers of methods without `layers` of their own; None: not looked for.
        roles: retrieval heads, as `heads:0+7.2` or `layers:0+7`, also for other policies; None: not looked for.
        found, scores: how, and what it was measured at, as free JSON.
        versions: of the software that found it.
        layers: re-selection layers by method, as `method_of` writes it.

    Raises:
        PolicyError: at construction, if policy, layers or roles do not fit the model.
    """

    KIND = "recipe"
    RECORD = _Record

    model: ModelShape
    policy: Policy
    reselect: tuple[int, ...] | None = None
    roles: str | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy.plan(self.model)
        # Methods know what fits a model and say so; which layers are dense is for the policy that takes these.
        for method, layers in (("tidal", self.reselect), *self.layers.items()):
            if layers is not None:
                name = Policy.from_spec(method).name
                Policy.create(name, {"reselect": layers, "dense_layers": 0}).plan(self.model)
        if self.roles is not None:
            if not self.roles.startswith(("heads:", "layers:")):
                raise PolicyError(f"roles={short(self.roles)} is not valid: heads:L+L.H or layers:N+N")
            Policy.create("lychee_decode", {"roles": self.roles}).plan(self.model)

    def layers_of(self, method: str) -> tuple[int, ...] | None:
        """Re-selection layers of a method; not looked for with its sets per query head: those per KV head; or None."""
        return self.layers.get(method, self.layers.get(method.partition(":")[0], self.reselect))

    @property
    def tuned(self) -> bool:
        """Whether `policy` is what `saccade tune` has found."""
        scores = self.scores.get("tune")
        return isinstance(scores, Mapping) and self.policy.to_spec() in scores

    @classmethod
    def of_record(cls, record: Any) -> Recipe:
        model, policy = record.model.shape(), Policy.from_spec(record.policy)
        told = record.found, record.scores, record.versions, record.layers
        return cls(model, policy, record.reselect, record.roles, *told)

    def to_json(self) -> str:
        data = {
            "version": 1,
            "model": to_dict(self.model, self.KIND),
            "policy": self.policy.to_spec(),
            "reselect": None if self.reselect is None else list(self.reselect),
            "roles": self.roles,
            "found": dict(self.found),
            "scores": dict(self.scores),
            "versions": dict(self.versions),
        }
        if self.layers:  # earlier versions read files without
            data["layers"] = {name: list(layers) for name, layers in self.layers.items()}
        try:
            return json.dumps(data, indent=2, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise PolicyError(f"a recipe's found and scores must be JSON without NaN: {error}") from None
