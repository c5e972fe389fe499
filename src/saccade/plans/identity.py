"""What tells one model from another: architecture, sizes and a hash of a few weights, in files and in words."""

from __future__ import annotations

from typing import Any

from ..errors import PolicyError
from ..files import Reader, short
from ..types import ModelShape

SIZES = ("layers", "query_heads", "kv_heads", "head_dim")


def fingerprint(shape: ModelShape) -> str:
    """What tells one model from another, in words."""
    sizes = ", ".join(f"{name}={getattr(shape, name)}" for name in SIZES)
    return f"{shape.architecture or 'unknown architecture'} ({sizes}, weights={shape.weights or 'unknown'})"


def same_model(one: ModelShape, other: ModelShape) -> bool:
    """Whether two shapes are of one model: its sizes, and what both sides know of its identity."""
    known = [
        name
        for name in ("architecture", "weights")
        if getattr(one, name) is not None and getattr(other, name) is not None
    ]
    return all(getattr(one, name) == getattr(other, name) for name in (*SIZES, *known))


def refuse_other(where: str, made_for: ModelShape, shape: ModelShape) -> None:
    """Raise unless what was made for one model is used with it.

    Raises:
        PolicyError: with both fingerprints.
    """
    if not same_model(made_for, shape):
        raise PolicyError(
            f"{where} belongs to another model: it is for {fingerprint(made_for)}, this one is {fingerprint(shape)}"
        )


def to_dict(shape: ModelShape, what: str) -> dict[str, Any]:
    """A file's `model`; `what` names the kind of file.

    Raises:
        PolicyError: if the architecture is unknown.
    """
    if shape.architecture is None:
        raise PolicyError(f"a {what} names its model's architecture, and this ModelShape does not know it")
    sizes = {name: getattr(shape, name) for name in SIZES}
    return {"architecture": shape.architecture, **sizes, "weights": shape.weights}


def read_model(reader: Reader, data: Any) -> ModelShape:
    """Inverse of `to_dict`.

    Raises:
        PolicyError: on anything that it does not make.
    """
    model = reader.keys(data, "model", ("architecture", *SIZES, "weights"))
    if not isinstance(model["architecture"], str) or not model["architecture"]:
        reader.refuse(f"model.architecture={short(model['architecture'])} is not valid: a model type, such as 'qwen3'")
    if model["weights"] is not None and not isinstance(model["weights"], str):
        reader.refuse(f"model.weights={short(model['weights'])} is not valid: a hash as text, or null")
    for name in SIZES:
        value = model[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            reader.refuse(f"model.{name}={short(value)} is not valid: a whole number, at least 1")
    if model["query_heads"] % model["kv_heads"]:
        reader.refuse(
            f"model.query_heads={model['query_heads']} is not valid: a multiple of kv_heads={model['kv_heads']}"
        )
    return ModelShape(**model)
