"""Policy options as data: declared once, validated at construction, the source of docs, schema and command line."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from ..errors import meant
from ..plans.head_list import KIND, HeadList
from ..plans.rectify import Rectify
from ..selection.selector import Selector

DEFAULT_BUDGET = 2048


class Options(BaseModel):
    """Base of every policy's options: frozen, unknown keys refused, no silent conversions between kinds of value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    _since: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """What options that came later say of a policy that was written down, with all that it had, before them."""

    @property
    def budgeted(self) -> bool:
        """Whether a fixed number of tokens bounds the sets."""
        return "budget" in type(self).model_fields

    @property
    def selector(self) -> Selector | None:
        """What chooses, if the options decide about it; made at their birth, since it knows what it cannot hold."""
        return None

    @model_validator(mode="after")
    def _selects(self) -> Options:
        _ = self.selector
        return self

    def at_share(self, share: float) -> dict[str, Any]:
        """Options that make sets of this share of a row; none if something else decides about their size."""
        return {}


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


def _role_source(value: Any) -> Any:
    """Where roles come from, as text that fits into a spec."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(text, str):
        raise ValueError("must be every:N, layers:N+N, heads:L+L.H or the path of a role file")
    kind, colon, rest = text.partition(":")
    if colon and kind == KIND:
        return str(HeadList.parse(text))
    if colon and kind in ("every", "layers"):
        numbers = rest.split("+") if kind == "layers" else [rest]
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise ValueError("must be every:N or layers:N+N with whole numbers N")
        if kind == "every" and int(rest) < 1:
            raise ValueError("every:N needs an N of at least 1")
        return f"{kind}:{'+'.join(str(int(number)) for number in numbers)}"
    if not text or text != text.strip() or "," in text or not text.isprintable():
        raise ValueError(
            "must be every:N, layers:N+N, heads:L+L.H or a path that fits into a spec: no comma, no blank at either end"
        )
    return text


Whole = Annotated[int, BeforeValidator(_whole)]
AtLeastOne = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Budget = Annotated[Whole, Field(ge=1, description="tokens a sparse head attends to, the current one included")]
Page = Annotated[Whole, Field(ge=1, description="tokens per selection page")]
Sinks = Annotated[Whole, Field(ge=0, description="first tokens of the sequence that are always attended to")]
Window = Annotated[Whole, Field(ge=0, description="last tokens that are always attended to, the current one included")]
Number = BeforeValidator(_number)
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), Number]
Recent = Annotated[
    float,
    Field(ge=0, le=1, allow_inf_nan=False, description="share of the budget kept for sinks and recent tokens"),
    Number,
]
Spread = Annotated[float, Field(ge=0, le=4, allow_inf_nan=False), Number]
DenseLayers = Annotated[Whole, Field(ge=0, description="how many first layers attend to everything")]
FirstDense = Annotated[
    DenseLayers | None,
    Field(description="how many first layers attend to everything; not given: 2, or 0 beside layers of other kinds"),
]
Reselect = Annotated[
    tuple[Annotated[Whole, Field(ge=0)], ...] | None,
    BeforeValidator(_layers),
    Field(description="layers that select again, beside the first one; not given: looked for, or refused; empty: none"),
]
Heads = Literal["kv", "query"]
Roles = Annotated[str, BeforeValidator(_role_source)]
RectifyField = Annotated[
    Rectify | None,
    PlainValidator(Rectify.read),
    PlainSerializer(lambda value: None if value is None else value.to_dict()),
    Field(description="sparse steps between dense passes over them, such as 32 or 32:verify; none: never"),
]


def moved(value: str, method: str, where: str = " of `claims`") -> BeforeValidator:
    """Refuse what an option was once given for something that only claims ask for, and say where that is now."""

    def check(given: Any) -> Any:
        if given == value:
            raise ValueError(f"it is the method {method}{where} now")
        return given

    return BeforeValidator(check)


_SAID = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
}
"""What pydantic says in a programmer's words, by its type of error."""


def told_in_one_line(name: str, kind: type[Options], error: ValidationError) -> str:
    """Which option of policy `name`, its value, and what would be valid."""
    first = error.errors(include_url=False)[0]
    option = str(first["loc"][0]) if first["loc"] else ""
    valid = ", ".join(kind.model_fields) or "none"
    if first["type"] == "extra_forbidden":
        return f"policy {name} has no option {option!r}; its options: {valid}{meant(option, kind.model_fields)}"
    reason = str(first["msg"]).removeprefix("Value error, ")
    reason = _SAID.get(first["type"], reason.replace("{", "{{").replace("}", "}}")).format(**first.get("ctx", {}))
    return (
        f"policy {name}: {option}={first['input']!r} is not valid: {reason[:1].lower()}{reason[1:]}"
        if option
        else (f"policy {name}: {reason}")
    )
