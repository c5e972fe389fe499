"""Colours and marks of policies: the Okabe-Ito set, told apart by colour-blind readers and by shape without colour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INK = "#1f2933"
MUTED = "#66727f"
GRID = "#e3e8ee"
FACT = "#d55e00"

_CYCLE = (
    ("#e69f00", "s"),
    ("#009e73", "^"),
    ("#cc79a7", "D"),
    ("#0072b2", "o"),
    ("#d55e00", "v"),
    ("#56b4e9", "P"),
    ("#000000", "X"),
)


@dataclass(frozen=True, slots=True)
class Mark:
    """How one policy is drawn: colour and marker."""

    color: str
    marker: str


DENSE = Mark(MUTED, "_")


def marks(labels: Iterable[str]) -> dict[str, Mark]:
    """A mark for every policy label, in order of appearance; dense is grey."""
    sparse = [label for label in dict.fromkeys(labels) if label != "dense"]
    return {"dense": DENSE, **{label: Mark(*_CYCLE[number % len(_CYCLE)]) for number, label in enumerate(sparse)}}
