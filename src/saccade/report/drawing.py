"""What the pictures of experiments share: style, a canvas, and SVG text that is the same for the same results."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure

from .palette import GRID, INK, MUTED, PAPER, SHADES, VALUE, Mark

Floats = Sequence[float]

SHARES = LinearSegmentedColormap.from_list("shares", [to_rgba(VALUE, 0.0), to_rgba(VALUE, 1.0)]).with_extremes(
    bad=to_rgba(MUTED, 0.22)
)
"""Shares from nothing to all, grey where there is none; seen through to the paper, light or dark."""
IN_CELL = "#fdfdfd"
"""Letters on a strong colour, which are the same on any paper."""

_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlelocation": "left",
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "svg.fonttype": "none",  # letters as text, which is shorter than outlines; whoever has not the font sees another
    "svg.hashsalt": "saccade",
}


@contextmanager
def canvas(width: float, height: float, font: float = 9.5) -> Iterator[Figure]:
    """A figure of so many inches in the package's style and size of letters; draw and export it inside."""
    with matplotlib.rc_context({**_STYLE, "font.size": font, "axes.titlesize": font + 0.5}):
        yield Figure(figsize=(width, height), layout="constrained")


def as_svg(figure: Figure) -> str:
    """The figure as SVG text to a hundredth of a point, without indentation, each style written once."""
    # A finished layout is fixed: its solver's last bits vary between runs, and SVG names clips by them.
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(tuple(round(edge, 6) for edge in axes.get_position(original=True).bounds))
    svg = io.StringIO()
    figure.savefig(svg, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")), format="svg", facecolor=PAPER)
    text = re.sub(r'((?:[ML] |[xy]=")-?\d+\.\d\d)\d*( -?\d+\.\d\d)?\d*', r"\1\2", svg.getvalue())
    text = re.sub(r'(\n) +| transform="rotate\(-0 [^"]*"', r"\1", text)  # turning by nothing
    styles: dict[str, int] = {}
    text = re.sub(r'style="([^"]*)"', lambda one: f'class="s{styles.setdefault(one[1], len(styles))}"', text)
    return text.replace("</style>", "".join(f".s{at}{{{style}}}" for style, at in styles.items()) + "</style>", 1)


def inline(figure: Figure, name: str) -> str:
    """The figure as an element of a page, in the page's colours: those of `SHADES` are its variables, `--ink` for one.

    `name` is in every id of the element: no two of a page may have the same.
    """
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"|(?<="text/css">)[^}]*}', "", as_svg(figure))
    svg = re.sub(r'(\bid="|href="#|url\(#|class="|\.(?=s\d+{))', rf"\g<1>{name}-", svg[svg.index("<svg") :])
    for shade, (color, _) in SHADES.items():
        svg = re.sub(f"{color}\\b", f"var(--{shade})", svg)
    return svg


def headline(figure: Figure, text: str) -> None:
    """A title of the whole figure, from its left edge."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=10)


def side_by_side(number: int, count: int, apart: float = 0.12) -> float:
    """How far to shift one of `count` series that share places on an axis, so that none hides another."""
    return min(apart, 0.8 / count) * (number - (count - 1) / 2)


def with_intervals(axes: Axes, at: Floats, values: Floats, ends: Sequence[Floats], mark: Mark, **style: Any) -> None:
    """Marks with whiskers between the `ends`, lower and upper, of each value's interval."""
    below = [max(value - low, 0.0) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(high - value, 0.0) for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(at, values, yerr=[below, above], **{"linestyle": "none", **mark, **style})
