"""Colours and marks of policies: the Okabe-Ito set and one more, told apart by shape without colour."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

INK = "#1f2933"
MUTED = "#66727f"
GRID = "#e3e8ee"
FACT = "#d55e00"

# Yellow is too faint on white; a violet takes its place.
_COLORS = ("#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#56b4e9", "#6a3d9a", "#000000")
# Eleven and eight have no common divisor, so 88 policies differ in one or the other.
_MARKERS = ("s", "^", "D", "o", "v", "P", "X", "*", "<", ">", "h")


@dataclass(frozen=True, slots=True)
class Mark:
    """How one policy is drawn: colour and marker."""

    color: str
    marker: str

    @property
    def style(self) -> dict[str, Any]:
        """As arguments of a drawing call."""
        return {"color": self.color, "marker": self.marker}


DENSE = Mark(MUTED, "_")


def marks(labels: Iterable[str]) -> dict[str, Mark]:
    """A mark for every policy label, in order of appearance; dense is grey."""
    sparse = [label for label in dict.fromkeys(labels) if label != "dense"]
    return {"dense": DENSE, **dict(zip(sparse, map(Mark, cycle(_COLORS), cycle(_MARKERS)), strict=False))}
