"""Recipes: the policy that was found for a model, and what it rests on. JSON, beside the model or anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PolicyError
from ..files import Reader, replace_text, short
from ..machine import versions
from ..methods.policy import Policy
from ..plans.identity import read_model, refuse_other, same_model, to_dict
from ..types import ModelShape

VERSION = 1

NAME = "saccade.json"
"""What a recipe is called beside its model's configuration."""

_KEYS = ("version", "model", "policy", "reselect", "roles", "found", "scores", "versions")


@dataclass(frozen=True)
class Recipe:
    """What calibration found for one model.

    Attributes:
        model: whom it is for.
        policy: what to decode with.
        reselect: re-selection layers, also for other policies than `policy`; None: not looked for.
        roles: retrieval heads, as `heads:0+7.2` or `layers:0+7`, also for other policies; None: not looked for.
        found: how, as free JSON.
        scores: what it was measured at, as free JSON.
        versions: of the software that found it.

    Raises:
        PolicyError: at construction, if one of the first four does not fit the model.
    """

    model: ModelShape
    policy: Policy
    reselect: tuple[int, ...] | None = None
    roles: str | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=versions)

    def __post_init__(self) -> None:
        self.policy.plan(self.model)
        # Methods know what fits a model and say so.
        if self.reselect is not None:
            Policy.create("tidal", {"reselect": self.reselect}).plan(self.model)
        if self.roles is not None:
            if not self.roles.startswith(("heads:", "layers:")):
                raise PolicyError(f"roles={short(self.roles)} is not valid: heads:L+L.H or layers:N+N")
            Policy.create("lychee_decode", {"roles": self.roles}).plan(self.model)

    @classmethod
    def read(cls, path: str | Path) -> Recipe:
        """Read a file.

        Raises:
            PolicyError: a file that is absent or not exactly what `write` writes; the message starts with its name.
        """
        where = f"recipe {path}"
        return cls.from_json(Reader(where).text(path), where)

    @classmethod
    def from_json(cls, text: str, where: str = "recipe") -> Recipe:
        """Inverse of `to_json`; `where` starts every message.

        Raises:
            PolicyError: unknown, missing or repeated keys, NaN, another version, or values that do not fit the model.
        """
        reader = Reader(where)
        data = reader.keys(reader.parse(text), "", _KEYS)
        reader.version(data["version"], VERSION)
        model = read_model(reader, data["model"])
        for name, kind, valid in (("policy", str, "a spec"), ("roles", str | None, "heads:L+L.H, layers:N+N or null")):
            if not isinstance(data[name], kind):
                reader.refuse(f"{name}={short(data[name])} is not valid: {valid}")
        named = reader.mapping(data["versions"], "versions", "which software found it")
        for package, number in named.items():
            if not isinstance(number, str):
                reader.refuse(f"versions.{package}={short(number)} is not valid: a version as text")
        found = reader.mapping(data["found"], "found", "how the recipe was found")
        scores = reader.mapping(data["scores"], "scores", "what was measured")
        reselect = _read_layers(reader, data["reselect"])
        try:
            return cls(model, Policy.from_spec(data["policy"]), reselect, data["roles"], found, scores, named)
        except PolicyError as error:
            raise PolicyError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """The file's text.

        Raises:
            PolicyError: `found` or `scores` hold NaN, an infinity, or what is not JSON; or the model's architecture is
                unknown.
        """
        data = {
            "version": VERSION,
            "model": to_dict(self.model, "recipe"),
            "policy": self.policy.to_spec(),
            "reselect": None if self.reselect is None else list(self.reselect),
            "roles": self.roles,
            "found": dict(self.found),
            "scores": dict(self.scores),
            "versions": dict(self.versions),
        }
        try:
            return json.dumps(data, indent=2, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise PolicyError(f"a recipe's found and scores must be JSON without NaN: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write the file whole, or leave the one that is there as it is.

        Raises:
            PolicyError: as `to_json`.
            OutputError: the file cannot be written.
        """
        replace_text(path, self.to_json(), "recipe")

    def belongs_to(self, shape: ModelShape) -> bool:
        """Whether it was found on this model: its sizes, and what both sides know of its identity."""
        return same_model(self.model, shape)

    def refuse_other(self, where: str, shape: ModelShape) -> None:
        """Raise for another model; `where` names the recipe.

        Raises:
            PolicyError: with both fingerprints.
        """
        refuse_other(where, self.model, shape)


def _read_layers(reader: Reader, data: Any) -> tuple[int, ...] | None:
    if data is None:
        return None
    if not isinstance(data, list) or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in data):
        reader.refuse(f"reselect={short(data)} is not valid: a list of layers, or null")
    return tuple(data)
