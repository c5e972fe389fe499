"""Colours, on light and on dark paper, and marks of policies: the Okabe-Ito set and one more, told apart by shape."""

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Any

INK = "#1f2933"
MUTED = "#66727f"
GRID = "#e3e8ee"
PAPER = "#ffffff"
FACT = "#d55e00"
VALUE = "#1769aa"
"""What heat maps are drawn in, from nothing to opaque, so that they read on either paper."""

SHADES = {
    "ink": (INK, "#e4e9ee"),
    "muted": (MUTED, "#9ba8b5"),
    "grid": (GRID, "#2b333c"),
    "paper": (PAPER, "#12171d"),
    "fact": (FACT, "#f08030"),
    "blue": ("#0072b2", "#4ba3dc"),
    "green": ("#009e73", "#1fba8c"),
    "violet": ("#6a3d9a", "#b292e0"),
    "black": ("#101418", "#fafbfc"),
}
"""Colours by name: what pictures are drawn with, on light paper; and what stands for it on dark paper."""

# Yellow is too faint on white; a violet takes its place. Black is not quite that: SVG leaves out what is its default.
_COLORS = ("#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#56b4e9", "#6a3d9a", "#101418")
# Eleven and eight have no common divisor, so 88 policies differ in one or the other.
_MARKERS = ("s", "^", "D", "o", "v", "P", "X", "*", "<", ">", "h")

Mark = Mapping[str, Any]
"""How one policy is drawn: `color` and `marker`, as a drawing call takes them."""


def marks(labels: Iterable[str]) -> dict[str, Mark]:
    """A mark for every policy label, in order of appearance; dense is grey."""
    sparse = [label for label in dict.fromkeys(labels) if label != "dense"]
    drawn = {"dense": (MUTED, "_"), **dict(zip(sparse, zip(cycle(_COLORS), cycle(_MARKERS)), strict=False))}
    return {label: {"color": color, "marker": marker} for label, (color, marker) in drawn.items()}
