"""Role files: which head of which model keeps reading everything. JSON, found once, read at every binding."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .errors import PolicyError
from .roles import RoleMap
from .types import ModelShape, Role

VERSION = 1

_SIZES = ("layers", "query_heads", "kv_heads", "head_dim")
_ROLES = {role.value: role for role in Role}


@dataclass(frozen=True)
class RoleFile:
    """The roles `[L][Hkv]` of one model's heads, the model they belong to, and how they were found (free JSON)."""

    model: ModelShape
    roles: RoleMap
    found: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> RoleFile:
        """Read a file.

        Raises:
            PolicyError: a file that is absent or not exactly what `write` writes; the message starts with its name.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: not UTF-8, or a name no file can have
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise PolicyError(f"role file {path} cannot be read: {reason}") from None
        return cls.from_json(text, f"role file {path}")

    @classmethod
    def from_json(cls, text: str, where: str = "role file") -> RoleFile:
        """Inverse of `to_json`; `where` starts every message.

        Raises:
            PolicyError: unknown or missing keys, NaN or infinity, another version, counts or names that do not fit.
        """
        reader = _Reader(where)
        data = reader.keys(reader.parse(text), "", ("version", "model", "roles", "found"))
        if isinstance(data["version"], bool) or data["version"] != VERSION:
            reader.refuse(f"version={_short(data['version'])} is not valid: this saccade reads version {VERSION}")
        model = reader.model(data["model"])
        roles = reader.roles(data["roles"], model)
        if not isinstance(data["found"], dict):
            reader.refuse(f"found={_short(data['found'])} is not valid: an object that says how the roles were found")
        try:
            return cls(model, RoleMap(roles), data["found"])
        except PolicyError as error:
            raise PolicyError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """The file's text: a layer a line.

        Raises:
            PolicyError: `found` holds NaN, an infinity, or what is not JSON; or the model's architecture is unknown.
        """
        if self.model.architecture is None:
            raise PolicyError("a role file names its model's architecture, and this ModelShape does not know it")
        model = {
            "architecture": self.model.architecture,
            **{name: getattr(self.model, name) for name in _SIZES},
            "weights": self.model.weights,
        }
        layers = ",\n    ".join(json.dumps([role.value for role in layer]) for layer in self.roles.layers)
        try:
            found = json.dumps(dict(self.found), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PolicyError(f"a role file's found must be JSON without NaN: {error}") from None
        return (
            f'{{\n  "version": {VERSION},\n  "model": {json.dumps(model)},\n'
            f'  "roles": [\n    {layers}\n  ],\n  "found": {found}\n}}\n'
        )

    def write(self, path: str | Path) -> None:
        """Write the file.

        Raises:
            PolicyError: as `to_json`, or the file cannot be written.
        """
        text = self.to_json()
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PolicyError(f"role file {path} cannot be written: {error.strerror or error}") from None

    def belongs_to(self, shape: ModelShape) -> bool:
        """Whether the roles were found on this model: its sizes, and what both sides know of its identity."""
        names = [*_SIZES]
        names += [
            name
            for name in ("architecture", "weights")
            if getattr(self.model, name) is not None and getattr(shape, name) is not None
        ]
        return all(getattr(self.model, name) == getattr(shape, name) for name in names)


def fingerprint(shape: ModelShape) -> str:
    """What tells one model from another, in words."""
    sizes = ", ".join(f"{name}={getattr(shape, name)}" for name in _SIZES)
    return f"{shape.architecture or 'unknown architecture'} ({sizes}, weights={shape.weights or 'unknown'})"


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the parts of one file; everything it refuses starts with where it stands."""

    where: str

    def refuse(self, what: str) -> NoReturn:
        raise PolicyError(f"{self.where}: {what}")

    def parse(self, text: str) -> Any:
        try:
            return json.loads(
                text, parse_constant=self._constant, parse_float=self._float, object_pairs_hook=self._object
            )
        except PolicyError:
            raise
        except (ValueError, RecursionError) as error:
            self.refuse(f"not JSON: {error}")

    def keys(self, data: Any, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
        """`data` as an object with exactly these keys."""
        prefix = f"{name}." if name else ""
        if not isinstance(data, dict):
            self.refuse(f"{name or 'the file'} is not an object; its keys are {', '.join(keys)}")
        for key in data:
            if key not in keys:
                self.refuse(f"unknown key {_short(prefix + key)}; its keys are {', '.join(keys)}")
        for key in keys:
            if key not in data:
                self.refuse(f"key {prefix + key!r} is missing; its keys are {', '.join(keys)}")
        return data

    def model(self, data: Any) -> ModelShape:
        model = self.keys(data, "model", ("architecture", *_SIZES, "weights"))
        if not isinstance(model["architecture"], str) or not model["architecture"]:
            self.refuse(
                f"model.architecture={_short(model['architecture'])} is not valid: a model type, such as 'qwen3'"
            )
        if model["weights"] is not None and not isinstance(model["weights"], str):
            self.refuse(f"model.weights={_short(model['weights'])} is not valid: a hash as text, or null")
        for name in _SIZES:
            value = model[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self.refuse(f"model.{name}={_short(value)} is not valid: a whole number, at least 1")
        if model["query_heads"] % model["kv_heads"]:
            self.refuse(
                f"model.query_heads={model['query_heads']} is not valid: a multiple of kv_heads={model['kv_heads']}"
            )
        return ModelShape(**model)

    def roles(self, data: Any, model: ModelShape) -> tuple[tuple[Role, ...], ...]:
        if not isinstance(data, list) or len(data) != model.layers:
            count = f"{len(data)} layers" if isinstance(data, list) else _short(data)
            self.refuse(f"roles={count} is not valid: a list for each of the model's {model.layers} layers")
        for layer, heads in enumerate(data):
            if not isinstance(heads, list) or len(heads) != model.kv_heads:
                count = f"{len(heads)} heads" if isinstance(heads, list) else _short(heads)
                self.refuse(
                    f"roles of layer {layer}: {count} is not valid: a role for each of {model.kv_heads} KV heads"
                )
            for head, role in enumerate(heads):
                if not isinstance(role, str) or role not in _ROLES:
                    place, valid = f"KV head {head} of layer {layer}", ", ".join(_ROLES)
                    self.refuse(f"role {_short(role)} of {place} is not valid: {valid}")
        return tuple(tuple(_ROLES[role] for role in heads) for heads in data)

    def _constant(self, text: str) -> NoReturn:
        self.refuse(f"{text} is not valid: every number must be finite")

    def _float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self.refuse(f"{text} is not valid: every number must be finite")
        return value

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = [name for name, _ in pairs]
            self.refuse(f"key {_short(next(name for name in names if names.count(name) > 1))} is given twice")
        return data


def _short(value: Any) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
