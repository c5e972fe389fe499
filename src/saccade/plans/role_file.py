"""Role files: which head of which model keeps reading everything. JSON, found once, read at every binding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PolicyError
from ..files import Reader, replace_text, short
from ..types import ModelShape, Role
from .identity import read_model, same_model, to_dict
from .roles import RoleMap

VERSION = 1

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
        where = f"role file {path}"
        return cls.from_json(Reader(where).text(path), where)

    @classmethod
    def from_json(cls, text: str, where: str = "role file") -> RoleFile:
        """Inverse of `to_json`; `where` starts every message.

        Raises:
            PolicyError: unknown or missing keys, NaN or infinity, another version, counts or names that do not fit.
        """
        reader = Reader(where)
        data = reader.keys(reader.parse(text), "", ("version", "model", "roles", "found"))
        reader.version(data["version"], VERSION)
        model = read_model(reader, data["model"])
        roles = _read_roles(reader, data["roles"], model)
        found = reader.mapping(data["found"], "found", "how the roles were found")
        try:
            return cls(model, RoleMap(roles), found)
        except PolicyError as error:
            raise PolicyError(f"{where}: {error}") from None

    def to_json(self) -> str:
        """The file's text: a layer a line.

        Raises:
            PolicyError: `found` holds NaN, an infinity, or what is not JSON; or the model's architecture is unknown.
        """
        model = to_dict(self.model, "role file")
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
        """Write the file whole, or leave the one that is there as it is.

        Raises:
            PolicyError: as `to_json`.
            OutputError: the file cannot be written.
        """
        replace_text(path, self.to_json(), "role file")

    def belongs_to(self, shape: ModelShape) -> bool:
        """Whether the roles were found on this model: its sizes, and what both sides know of its identity."""
        return same_model(self.model, shape)


def _read_roles(reader: Reader, data: Any, model: ModelShape) -> tuple[tuple[Role, ...], ...]:
    if not isinstance(data, list) or len(data) != model.layers:
        count = f"{len(data)} layers" if isinstance(data, list) else short(data)
        reader.refuse(f"roles={count} is not valid: a list for each of the model's {model.layers} layers")
    for layer, heads in enumerate(data):
        if not isinstance(heads, list) or len(heads) != model.kv_heads:
            count = f"{len(heads)} heads" if isinstance(heads, list) else short(heads)
            reader.refuse(f"roles of layer {layer}: {count} is not valid: a role for each of {model.kv_heads} KV heads")
        for head, role in enumerate(heads):
            if not isinstance(role, str) or role not in _ROLES:
                place, valid = f"KV head {head} of layer {layer}", ", ".join(_ROLES)
                reader.refuse(f"role {short(role)} of {place} is not valid: {valid}")
    return tuple(tuple(_ROLES[role] for role in heads) for heads in data)
