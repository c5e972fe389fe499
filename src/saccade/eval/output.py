"""Files of experiments, written whole or line by line; records in groups, and lists of numbers as users give them."""

import json
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import OutputError, SaccadeError
from ..files import replace_text

SAMPLES, GAZE, RECALL = "samples.jsonl", "gaze.jsonl", "recall.jsonl"
RESULTS, CONFIGURATION, REPORT = "results.json", "config.json", "report.html"

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """What the system says against writing there becomes an OutputError; `what` is the kind of file."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{what}{str(path)!r} cannot be written: {error.strerror}") from error


def check_folder(path: Path) -> None:
    """Make a folder and try whether it can be written, or raise an OutputError; nothing in it is touched."""
    with writing(path, "results folder "):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def check_file(path: Path) -> None:
    """Try whether a file can be written, or raise an OutputError; what it holds stays, and none is made."""
    with writing(path), path.open("a") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
        pass


def write_json(path: Path, data: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write JSON, whole or not at all; see `replace_text`."""
    replace_text(path, json.dumps(data, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` has written; an OutputError if it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OutputError(f"{str(path)!r} does not hold results to go on with")
    return found


class JsonLines(ExitStack):
    """A file that grows by a record a line, each written when `add` returns, so that a broken-off run is readable.

    Raises:
        OutputError: from every method, if the file cannot be written; what was written before stays readable.
    """

    def __init__(self, path: Path, mode: Literal["a", "w"]) -> None:
        super().__init__()
        self.path = path
        with writing(path):
            self._file = path.open(mode, encoding="utf-8")
        self.callback(self._close)

    def add(self, record: dict[str, Any]) -> None:
        with writing(self.path):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def _close(self) -> None:
        with writing(self.path):  # what a full disk did not take is still in the buffer
            self._file.close()


class ResultsFolder(ExitStack):
    """A folder that is being written; files of an earlier run are overwritten.

    Raises:
        OutputError: at construction, if the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        with writing(path, "results folder "):
            for name in (RESULTS, CONFIGURATION, REPORT):
                # A stale result beside new answers would be taken for theirs.
                (path / name).unlink(missing_ok=True)
        names = (SAMPLES, GAZE, RECALL)
        self._lines = {name: self.enter_context(JsonLines(path / name, "w")) for name in names}

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Append to `SAMPLES` (answered questions), `GAZE` (where policies looked) or `RECALL` (of answer tokens)."""
        self._lines[name].add(record)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by what `key` says of them, in order of appearance."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def whole_numbers(option: str, text: str, *, at_least: int) -> tuple[int, ...]:
    """Read `4096,32768`, each number once, in the order given; or raise a SaccadeError that says what is valid."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or int(part) < at_least:
            raise SaccadeError(f"{option} {part!r} is not valid: whole numbers of at least {at_least}, such as 64,256")
    return tuple(dict.fromkeys(map(int, parts)))
