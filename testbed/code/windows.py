"""The tokens of the training texts and the held-out stretches, packed in one folder; windows of them."""

import hashlib
import json
import lzma
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from saccade.errors import SaccadeError

POSITIONS = 16_384
TARGETS = 512
TRAINING, STRETCHES, CONTENTS = "training.xz", "held_out.xz", "contents.json"
Tokens = NDArray[numpy.uint16]

_FILTERS: list[dict[str, int]] = [
    # Pairs of bytes: positions by twos (lp, pb), no context of the byte before (lc).
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27, "nice_len": 273, "lc": 0, "lp": 1, "pb": 1}
]


@dataclass(frozen=True)
class Stretch:
    """`POSITIONS` tokens of a held-out package, the last `TARGETS` of which lie in the file `path`.

    `own`: how many of those before them lie in that file too.
    """

    package: str
    path: str
    own: int


@dataclass(frozen=True)
class Streams:
    """The training tokens, package behind package.

    `begins`: where each package begins in `tokens`, and where the last one ends.
    """

    tokens: Tokens
    packages: tuple[str, ...]
    begins: tuple[int, ...]

    def starts(self, rows: int, length: int, rng: numpy.random.Generator) -> NDArray[numpy.int64]:
        """Where `rows` windows of `length` tokens and the one behind them begin, each within one package.

        All places are equally likely, so a package is drawn by its length.

        Raises:
            SaccadeError: no package is as long.
        """
        places = numpy.array([max(0, end - begin - length) for begin, end in pairwise(self.begins)])
        bounds = places.cumsum()
        if not bounds[-1]:
            raise SaccadeError(f"windows of {length} tokens: no package of the training texts has as many")
        drawn = rng.integers(0, bounds[-1], rows)
        package = numpy.searchsorted(bounds, drawn, side="right")
        within = drawn - (bounds - places)[package]
        return numpy.asarray(numpy.array(self.begins)[package] + within, dtype=numpy.int64)


def write(folder: Path, streams: Streams, stretches: list[Stretch], held_out: Tokens, about: dict[str, Any]) -> None:
    """Pack training tokens, and held-out stretches [N, POSITIONS], with what is told `about` them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokens in ((TRAINING, streams.tokens), (STRETCHES, held_out)):
        (folder / name).write_bytes(lzma.compress(tokens.astype("<u2").tobytes(), lzma.FORMAT_XZ, filters=_FILTERS))
    contents = {
        **about,
        "tokens": int(streams.tokens.size),
        "sha256": _digest(streams.tokens),
        "held_out_sha256": _digest(held_out),
        "packages": dict(zip(streams.packages, streams.begins, strict=False)),
        "stretches": [asdict(stretch) for stretch in stretches],
    }
    (folder / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n")


def read_contents(folder: Path) -> dict[str, Any]:
    """What `write` has told of the data.

    Raises:
        SaccadeError: the folder holds no data.
    """
    if not (folder / CONTENTS).is_file():
        raise SaccadeError(
            f"--data {folder} holds no {CONTENTS}; make it with python -m testbed.code.corpus --out {folder}"
        )
    contents: dict[str, Any] = json.loads((folder / CONTENTS).read_text())
    return contents


def read_streams(folder: Path) -> Streams:
    """The training tokens.

    Raises:
        SaccadeError: there are none, or not those that the folder tells of.
    """
    contents = read_contents(folder)
    tokens = _unpacked(folder / TRAINING, contents["sha256"])
    packages = contents["packages"]
    return Streams(tokens, tuple(packages), (*packages.values(), tokens.size))


def read_stretches(folder: Path) -> tuple[list[Stretch], Tokens]:
    """The held-out stretches and their tokens [N, POSITIONS]; errors as `read_streams`."""
    contents = read_contents(folder)
    stretches = [Stretch(**stretch) for stretch in contents["stretches"]]
    return stretches, _unpacked(folder / STRETCHES, contents["held_out_sha256"]).reshape(len(stretches), -1)


def _unpacked(path: Path, expected: str) -> Tokens:
    try:
        tokens = numpy.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2").astype(numpy.uint16)
    except (OSError, lzma.LZMAError) as error:
        raise SaccadeError(f"{path} cannot be read: {error}") from None
    if _digest(tokens) != expected:
        raise SaccadeError(f"{path} is not what {CONTENTS} beside it tells of; make both anew")
    return tokens


def _digest(tokens: Tokens) -> str:
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()[:16]
