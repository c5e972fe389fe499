"""Recipes: the policy that was found for a model, and what it rests on. JSON, beside the model or anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from ..errors import PolicyError
from ..files import Record, Version, parse, read_text, replace_text, short
from ..machine import versions
from ..methods.policy import Policy
from ..plans.identity import ModelRecord, to_dict
from ..types import ModelShape

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
        return cls.from_json(read_text(path, where), where)

    @classmethod
    def from_json(cls, text: str, where: str = "recipe") -> Recipe:
        """Inverse of `to_json`; `where` starts every message.

        Raises:
            PolicyError: unknown, missing or repeated keys, NaN, another version, or values that do not fit the model.
        """
        record = parse(_Record, text, where)
        try:
            return cls(
                record.model.shape(),
                Policy.from_spec(record.policy),
                record.reselect,
                record.roles,
                record.found,
                record.scores,
                record.versions,
            )
        except PolicyError as error:
            raise PolicyError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """The file's text.

        Raises:
            PolicyError: `found` or `scores` hold NaN, an infinity, or what is not JSON; or the model's architecture is
                unknown.
        """
        data = {
            "version": 1,
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
