"""Files written whole or not at all, and JSON files read back exactly as they were written."""

import json
import math
import os
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from .errors import OutputError, PolicyError


def replace_text(path: str | Path, text: str, what: str = "") -> None:
    """`replace_bytes` of text in UTF-8."""
    replace_bytes(path, text.encode(), what)


def replace_bytes(path: str | Path, content: bytes, what: str = "") -> None:
    """Write beside the file, in full and to the disk, and put that in the file's place; messages call it `what`.

    Raises:
        OutputError: if it cannot be written; the file is as it was and nothing is left beside it.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
    except OSError as error:
        name = f"{what} {str(path)!r}".lstrip()
        raise OutputError(f"{name} cannot be written: {error.strerror or error}") from error


class Record(BaseModel):
    """An object in a JSON file of ours: exactly these keys, and no conversions between kinds of value.

    The description of a field says what is valid there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


RecordT = TypeVar("RecordT", bound=Record)


def _readable(version: int) -> int:
    if version != 1:
        raise ValueError("this saccade reads version 1")
    return version


Version = Annotated[int, AfterValidator(_readable)]
"""Of a file's form."""


def read_text(path: str | Path, where: str) -> str:
    """What a file holds; `where` names it, such as `role file PATH`.

    Raises:
        PolicyError: if it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a ValueError: not UTF-8, or a name no file can have
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise PolicyError(f"{where} cannot be read: {reason}") from None


def parse(kind: type[RecordT], text: str, where: str) -> RecordT:
    """The record that a file holds.

    Raises:
        PolicyError: not JSON, NaN or an infinity, a key that is repeated, unknown or missing, or a value that is not
            valid: one line that starts with `where`.
    """
    try:
        json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_once)
        return kind.model_validate_json(text)
    except ValidationError as error:
        reason = _reason(kind, error)
    except PolicyError as error:
        reason = str(error)
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
        reason = f"not JSON: {error}"
    raise PolicyError(f"{where}: {reason}")


KeptT = TypeVar("KeptT", bound="Kept")


class Kept(ABC):
    """What is kept in a JSON file of ours; a subclass says what such a file is called and what its record becomes."""

    KIND: ClassVar[str]
    RECORD: ClassVar[type[Record]]

    @classmethod
    @abstractmethod
    def of_record(cls: type[KeptT], record: Any) -> KeptT:
        """What a `RECORD` says; a PolicyError if its values do not fit the model."""

    @abstractmethod
    def to_json(self) -> str:
        """The file's text.

        Raises:
            PolicyError: a free part holds what is not JSON, NaN or an infinity; or the model's architecture is unknown.
        """

    @classmethod
    def read(cls: type[KeptT], path: str | Path) -> KeptT:
        """Read a file.

        Raises:
            PolicyError: a file that is absent or not exactly what `write` writes; the message starts with its name.
        """
        where = f"{cls.KIND} {path}"
        return cls.from_json(read_text(path, where), where)

    @classmethod
    def from_json(cls: type[KeptT], text: str, where: str = "") -> KeptT:
        """Inverse of `to_json`; `where`, or what such files are called, starts every message.

        Raises:
            PolicyError: as `parse`, and for another version or values that do not fit the model.
        """
        record = parse(cls.RECORD, text, where or cls.KIND)
        try:
            return cls.of_record(record)
        except PolicyError as error:
            raise PolicyError(f"{where or cls.KIND}: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write the file whole, or leave the one that is there as it is.

        Raises:
            PolicyError: as `to_json`.
            OutputError: the file cannot be written.
        """
        replace_text(path, self.to_json(), self.KIND)


def short(value: Any) -> str:
    """A value in one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise PolicyError(f"{text} is not valid: every number must be finite")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PolicyError(f"key {short(twice)} is given twice")
    return dict(pairs)


def _reason(kind: type[Record], error: ValidationError) -> str:
    """The first of the errors that lie least deep; what is valid is the description of its field, if it has one."""
    first = min(error.errors(include_url=False, include_context=False), key=lambda found: len(found["loc"]))
    what, place, valid = first["type"], ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    for name in first["loc"][:-1] if what == "missing" else first["loc"]:
        field = kind.model_fields.get(str(name))
        if field is None:
            break
        valid = field.description or valid
        if isinstance(field.annotation, type) and issubclass(field.annotation, Record):
            kind = field.annotation
    if what == "json_invalid":
        return f"not JSON: {valid}"
    structure = {
        "missing": f"key {place!r} is missing",
        "extra_forbidden": f"unknown key {short(place)}",
        "model_type": f"{place or 'the file'} is not an object",
    }
    if what in structure:
        return f"{structure[what]}; its keys are {', '.join(kind.model_fields)}"
    return f"{place}={short(first['input'])} is not valid: {valid}" if place else valid
