"""Role files: which head of which model keeps reading everything. JSON, found once, read at every binding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, model_validator

from ..errors import PolicyError
from ..files import Kept, Record, Version
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
            if heads and len(heads) != kv_heads:
                raise ValueError(
                    f"roles of {len(heads)} heads are not valid in layer {layer}: it has {kv_heads} KV heads"
                )
        return self


@dataclass(frozen=True)
class RoleFile(Kept):
    """The roles `[L][Hkv]` of one model's heads, the model they belong to, and how they were found (free JSON)."""

    KIND = "role file"
    RECORD = _Record

    model: ModelShape
    roles: RoleMap
    found: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_record(cls, record: Any) -> RoleFile:
        return cls(record.model.shape(), RoleMap(record.roles), record.found)

    def to_json(self) -> str:
        model = to_dict(self.model, self.KIND)
        # A layer a line.
        layers = ",\n    ".join(json.dumps([role.value for role in layer]) for layer in self.roles.layers)
        try:
            found = json.dumps(dict(self.found), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PolicyError(f"a role file's found must be JSON without NaN: {error}") from None
        return (
            f'{{\n  "version": 1,\n  "model": {json.dumps(model)},\n'
            f'  "roles": [\n    {layers}\n  ],\n  "found": {found}\n}}\n'
        )
