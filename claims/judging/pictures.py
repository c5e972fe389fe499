"""Pictures of verdicts: every test's effect and interval beside its bound, and what the paper reports."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from saccade.report.drawing import as_svg, canvas
from saccade.report.palette import FACT, INK, MUTED, SHADES

from .claim import HOLDS, REFUTED, VERDICTS
from .results import Result

COLORS = {HOLDS: SHADES["green"][0], REFUTED: FACT}
"""Of verdicts; all others are grey."""
_LETTERS, _LINE = 46, 0.17


def picture(results: Sequence[Result]) -> str:
    """A panel per result, as SVG; a dot with its interval per test, hollow where it only stands beside."""
    heights = [0.55 + sum(_lines(test["effect"]) for test in found["tests"]) * 1.35 * _LINE for found in results]
    with canvas(8.2, sum(heights) + 0.3, font=8.5) as figure:
        panels = figure.subplots(len(results), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, found in zip(panels, results, strict=True):
            _panel(axes, found)
        return as_svg(figure)


def _panel(axes: Axes, found: Result) -> None:
    tests = found["tests"]
    places, labels, place = [], [], 0.0
    for test in tests:
        lines = _lines(test["effect"])
        places.append(place + lines / 2)
        labels.append(fill(test["effect"], _LETTERS))
        axes.vlines(test["bound"], place, place + lines, color=MUTED, linewidth=1, linestyle="dashed")
        _mark(axes, test, places[-1])
        place += lines
    axes.set_yticks(places, labels)
    axes.set_ylim(place + 0.2, -0.2)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.grid(visible=False)
    axes.set_title(f"{found['claim']} on {found['on']}: {found['verdict']}", color=_color(found["verdict"]))


def _mark(axes: Axes, test: Result, place: float) -> None:
    color = _color(test["verdict"])
    if test["interval"] is not None:
        axes.plot(test["interval"], [place, place], color=color, linewidth=1.6)
    if test["value"] is not None:
        axes.plot(
            test["value"], place, "o", color=color, markersize=5, markerfacecolor=color if test["decides"] else "w"
        )
    if test["reported"] is not None:
        axes.plot(test["reported"], place, "|", color=INK, markersize=11)


def _color(verdict: str) -> str:
    assert verdict in VERDICTS
    return COLORS.get(verdict, MUTED)


def _lines(effect: str) -> int:
    return len(fill(effect, _LETTERS).splitlines())
