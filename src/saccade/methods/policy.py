"""A policy: a method's name and its options. Data, frozen, JSON both ways; bound to a model it becomes a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from ..errors import PolicyError
from ..plans.plan import Plan
from ..plans.rectify import Phase, Rectify
from ..types import ModelShape
from .options import Options, told_in_one_line
from .registry import describe

VERSION = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """A method's `name` and validated `options`. Make one with `saccade.policy(...)` or `Policy.from_spec(...)`."""

    name: str
    options: Options

    @classmethod
    def create(cls, name: str, options: Mapping[str, Any]) -> Policy:
        """Validate options for a policy.

        Raises:
            PolicyError: unknown policy or option, or a value out of range.
        """
        kind = describe(name).options
        try:
            return cls(name, kind.model_validate(dict(options)))
        except ValidationError as error:
            raise PolicyError(told_in_one_line(name, kind, error)) from None

    @classmethod
    def from_spec(cls, spec: str) -> Policy:
        """Read `name:key=value,key=value`; lists join with `+`, a value starts after the first `=`.

        Raises:
            PolicyError: a malformed spec, an unknown policy or option, or a value out of range.
        """
        return policy(spec)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Inverse of `to_json`; unknown keys and other versions are errors.

        Raises:
            PolicyError: on anything that `to_json` does not write.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
            raise PolicyError(f"policy JSON cannot be read: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Policy:
        """Inverse of `to_dict`.

        Raises:
            PolicyError: on anything that `to_dict` does not make.
        """
        keys = {"version", "name", "options"}
        if not isinstance(data, dict) or set(data) != keys or not isinstance(data["options"], dict):
            raise PolicyError(f"policy JSON needs exactly the keys {', '.join(sorted(keys))}")
        if isinstance(data["version"], bool) or data["version"] != VERSION:
            raise PolicyError(f"policy JSON has version {data['version']!r}; this saccade reads version {VERSION}")
        if not isinstance(data["name"], str):
            raise PolicyError(f"policy JSON name={data['name']!r} is not a string")
        kind = describe(data["name"]).options
        known = kind.model_fields
        # An option that has gone since and was not given says nothing.
        given = {key: value for key, value in data["options"].items() if value is not None or key in known}
        since = dict(kind._since)
        before = since if known.keys() - since.keys() <= data["options"].keys() else {}
        return cls.create(data["name"], {**before, **given})

    def to_json(self) -> str:
        """JSON object with `version`, `name` and `options`."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The object of `to_json`, of plain values."""
        return {"version": VERSION, "name": self.name, "options": self.options.model_dump(mode="json")}

    def to_spec(self) -> str:
        """The shortest spec string that `from_spec` reads back as this policy."""
        defaults = {name: field.default for name, field in type(self.options).model_fields.items()}
        given = {key: getattr(self.options, key) for key in self.options.model_dump(exclude_unset=True)}
        # An option that is None by default need not be said; one that is not must be switched off by name.
        told = {key: value for key, value in given.items() if value is not None or defaults[key] is not None}
        parts = (f"{key}={_spec_value(value)}" for key, value in told.items())
        return ":".join(filter(None, (self.name, ",".join(parts))))

    @property
    def budget(self) -> int | None:
        """Tokens a sparse head attends to; None for a policy that has no fixed budget."""
        return getattr(self.options, "budget", None) if self.options.budgeted else None

    @property
    def rectify(self) -> Rectify | None:
        """How sparse steps are made good; None if they are not."""
        return getattr(self.options, "rectify", None)

    @property
    def phase(self) -> Phase:
        """When sparse steps are made good."""
        return Phase(None if self.rectify is None else self.rectify.every)

    def with_budget(self, budget: int) -> Policy:
        """This policy at another budget; itself if it has none or was given one.

        Raises:
            PolicyError: a budget that the policy cannot work with.
        """
        if not self.options.budgeted or "budget" in self.options.model_fields_set:
            return self
        return Policy.create(self.name, {**self.options.model_dump(exclude_unset=True), "budget": budget})

    def plan(self, shape: ModelShape) -> Plan:
        """Bind to a model.

        Raises:
            PolicyError: if the policy does not fit the model.
        """
        try:
            plan = describe(self.name).plan(self.options, shape)
        except PolicyError as error:
            raise PolicyError(f"policy {self.name}: {error}") from None
        return replace(plan, notes=tuple(f"{self.name}: {note}" for note in plan.notes), sources=shape.sources)

    def settled(self, shape: ModelShape) -> Policy:
        """This policy with the layer named that its plan guesses: for random weights, among which none retrieves."""
        plan = self.plan(shape)
        if plan.guessed is None:
            return self
        # No layer behind the guessed one selects.
        layer = max(layer for layer, roles in enumerate(plan.roles.layers) if any(one.refreshes for one in roles))
        return Policy.create(self.name, {**self.options.model_dump(exclude_unset=True), plan.guessed: layer})

    def __str__(self) -> str:
        return self.to_spec()


def policy(name: str, **options: Any) -> Policy:
    """The policy `name`, or that of a spec `name:key=value,key=value`, with the given options.

    Examples: `saccade.policy("less_is_more", budget=2048, reselect=12)`, `saccade.policy("less_is_more:budget=2048")`.

    Raises:
        PolicyError: a malformed spec, an unknown policy or option, an option given twice, or a value out of range.
    """
    if not isinstance(name, str):
        raise PolicyError(f"policy={name!r} is not a policy's name or spec, such as 'tidal:budget=64'")
    own, _, rest = name.partition(":")
    own, told = describe(own.strip()).name, dict(options)
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise PolicyError(
                f"policy spec {name!r}: {part!r} is not key=value; write name:key=value,key=value, and lists with +"
            )
        if key in told:
            raise PolicyError(f"policy spec {name!r}: option {key!r} is given twice")
        told[key] = value
    return Policy.create(own, told)


def _spec_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
