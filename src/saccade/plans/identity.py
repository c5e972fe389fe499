"""What tells one model from another: architecture, sizes and a hash of a few weights, in files and in words."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from ..errors import PolicyError
from ..files import Record
from ..types import FULL, ModelShape

SIZES = ("layers", "query_heads", "kv_heads", "head_dim")
WIDTHS = ("hidden_size", "intermediate_size")
"""Unknown in files of before."""

Size = Annotated[int, Field(ge=1, description="a whole number, at least 1")]
Width = Annotated[int | None, Field(ge=1, description="a whole number, at least 1, or null")]


class ModelRecord(Record):
    """A file's `model`."""

    architecture: str = Field(min_length=1, description="a model type, such as 'qwen3'")
    layers: Size
    query_heads: Size
    kv_heads: Size
    head_dim: Size
    weights: str | None = Field(description="a hash as text, or null")
    hidden_size: Width = None
    intermediate_size: Width = None
    kinds: tuple[str, ...] = Field((), description="what every layer is, where not all have full attention")

    @model_validator(mode="after")
    def _whole_groups(self) -> ModelRecord:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} is no multiple of kv_heads={self.kv_heads}")
        if self.kinds and (len(self.kinds) != self.layers or FULL not in self.kinds):
            raise ValueError(f"kinds of {len(self.kinds)} layers are not valid: {self.layers}, some of them {FULL}")
        return self

    def shape(self) -> ModelShape:
        return ModelShape(**self.model_dump())


def fingerprint(shape: ModelShape) -> str:
    """What tells one model from another, in words."""
    sizes = ", ".join(f"{name}={getattr(shape, name) or 'unknown'}" for name in (*SIZES, *WIDTHS, "weights"))
    return f"{shape.architecture or 'unknown architecture'} ({sizes})"


def same_model(one: ModelShape, other: ModelShape) -> bool:
    """Whether two shapes are of one model: its sizes, and what both sides know of its identity."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in (*SIZES, *WIDTHS, "architecture", "weights")]
    return all(left == right for left, right in pairs if left is not None and right is not None)


def refuse_other(where: str, made_for: ModelShape, shape: ModelShape) -> None:
    """Raise a PolicyError with both fingerprints unless what was made for one model is used with it."""
    if not same_model(made_for, shape):
        both = f"it is for {fingerprint(made_for)}, this one is {fingerprint(shape)}"
        raise PolicyError(f"{where} belongs to another model: {both}")


def to_dict(shape: ModelShape, what: str) -> dict[str, Any]:
    """What becomes a `ModelRecord` when it is read; `what` names the kind of file.

    Raises:
        PolicyError: if the architecture is unknown.
    """
    if shape.architecture is None:
        raise PolicyError(f"a {what} names its model's architecture, and this ModelShape does not know it")
    told = {name: getattr(shape, name) for name in ModelRecord.model_fields}
    return told if shape.kinds else {name: value for name, value in told.items() if name != "kinds"}
