"""Policy options as data: declared once, validated at construction, the source of docs, schema and command line."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .errors import PolicyError

DEFAULT_BUDGET = 2048


class Options(BaseModel):
    """Base of every policy's options: frozen, unknown keys refused, no silent conversions between kinds of value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _whole(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, float) and not (math.isfinite(value) and value.is_integer())):
        raise ValueError("must be a whole number")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _layers(value: Any) -> Any:
    if value is None or isinstance(value, (tuple, list)):
        return value
    if isinstance(value, str):
        return tuple(value.split("+")) if value else ()
    return (value,)


Whole = Annotated[int, BeforeValidator(_whole)]
Budget = Annotated[Whole, Field(ge=1, description="tokens a sparse head attends to, the current one included")]
Page = Annotated[Whole, Field(ge=1, description="tokens per selection page")]
Sinks = Annotated[Whole, Field(ge=0, description="first tokens of the sequence that are always attended to")]
Recent = Annotated[
    float,
    Field(ge=0, le=1, allow_inf_nan=False, description="share of the budget kept for sinks and recent tokens"),
    BeforeValidator(_number),
]
DenseLayers = Annotated[Whole, Field(ge=0, description="how many first layers attend to everything")]
Reselect = Annotated[
    tuple[Annotated[Whole, Field(ge=0)], ...] | None,
    BeforeValidator(_layers),
    Field(description="layers that select again, beside the first selection layer; not given: layer L//2; empty: none"),
]

OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(name: str, kind: type[OptionsT], given: dict[str, Any]) -> OptionsT:
    """Validate `given` for policy `name`.

    Raises:
        PolicyError: one line that names the option, the value and what would be valid.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise PolicyError(_one_line(name, kind, error)) from None


def _one_line(name: str, kind: type[Options], error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    option = str(first["loc"][0]) if first["loc"] else ""
    valid = ", ".join(kind.model_fields) or "none"
    if first["type"] == "extra_forbidden":
        return f"policy {name} has no option {option!r}; its options: {valid}"
    reason = str(first["msg"]).removeprefix("Value error, ")
    return (
        f"policy {name}: {option}={first['input']!r} is not valid: {reason[:1].lower()}{reason[1:]}"
        if option
        else (f"policy {name}: {reason}")
    )
