"""Role files: which head of which model keeps reading everything. JSON, found once, read at every binding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from ..errors import PolicyError
from ..files import Record, Version, parse, read_text, replace_text
from ..types import ModelShape, Role
from .identity import ModelRecord, to_dict
from .roles import RoleMap


class _Record(Record):
    version: Version
    model: ModelRecord
    roles: tuple[tuple[Role, ...], ...] = Field(
        description=f"{', '.join(role.value for role in Role)}, one for each KV head in a list for each layer"
    )
    found: dict[str, Any] = Field(description="an object that says how the roles were found")

    @model_validator(mode="after")
    def _a_role_for_every_head(self) -> _Record:
        layers, kv_heads = self.model.layers, self.model.kv_heads
        if len(self.roles) != layers:
            raise ValueError(f"roles of {len(self.roles)} layers are not valid: the model has {layers} layers")
        for layer, heads in enumerate(self.roles):
            if len(heads) != kv_heads:
                raise ValueError(
                    f"roles of {len(heads)} heads are not valid in layer {layer}: it has {kv_heads} KV heads"
                )
        return self


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
        return cls.from_json(read_text(path, where), where)

    @classmethod
    def from_json(cls, text: str, where: str = "role file") -> RoleFile:
        """Inverse of `to_json`; `where` starts every message.

        Raises:
            PolicyError: unknown or missing keys, NaN or infinity, another version, counts or names that do not fit.
        """
        record = parse(_Record, text, where)
        try:
            return cls(record.model.shape(), RoleMap(record.roles), record.found)
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
            f'{{\n  "version": 1,\n  "model": {json.dumps(model)},\n'
            f'  "roles": [\n    {layers}\n  ],\n  "found": {found}\n}}\n'
        )

    def write(self, path: str | Path) -> None:
        """Write the file whole, or leave the one that is there as it is.

        Raises:
            PolicyError: as `to_json`.
            OutputError: the file cannot be written.
        """
        replace_text(path, self.to_json(), "role file")
