"""Pictures of verdicts: every test's effect and interval beside its bound, and what the paper reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from saccade.report.drawing import as_svg, canvas
from saccade.report.palette import FACT, INK, MUTED, SHADES

from .claim import HOLDS, REFUTED, VERDICTS
from .results import Result

COLORS = {HOLDS: SHADES["green"][0], REFUTED: FACT}
"""Of verdicts; all others are grey."""
TOYS = ("bundled", "testbed/code/code_model")
"""Small models of ours; they are shown where nothing else was measured, since their effects are of another size."""
_MARKERS, _SIGNS = "osD^v", "●■◆▲▼"
"""Of what a claim was measured on, one after the other; and what they look like in letters."""
_LETTERS, _LINE, _ROW = 46, 0.17, 0.75


def picture(results: Sequence[Result]) -> str:
    """A panel per claim, as SVG; a mark with its interval per test and model, hollow where it only stands beside."""
    panels = [*_shown(results).values()]
    heights = [0.55 + sum(_height(test, len(held)) for test in held[0]["tests"]) * 1.35 * _LINE for held in panels]
    with canvas(8.2, sum(heights) + 0.3, font=8.5) as figure:
        drawn = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, held in zip(drawn, panels, strict=True):
            _panel(axes, held)
        return as_svg(figure)


def _shown(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by claim, without the toys where there are others."""
    held: dict[str, list[Result]] = {}
    for found in results:
        held.setdefault(found["claim"], []).append(found)
    return {claim: [one for one in own if one["on"] not in TOYS] or own for claim, own in held.items()}


def _panel(axes: Axes, results: Sequence[Result]) -> None:
    tests, top = results[0]["tests"], 0.0
    ticks, marks = [], _Marks()
    for number, test in enumerate(tests):
        height = _height(test, len(results))
        ticks.append(top + height / 2)
        marks.bounds.append((test["bound"], top, top + height))
        for row, found in enumerate(results):
            marks.add(found["tests"][number], _MARKERS[row % len(_MARKERS)], top + height * (row + 0.5) / len(results))
        top += height
    marks.draw(axes)
    axes.set_yticks(ticks, [fill(test["effect"], _LETTERS) for test in tests])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top + 0.2, -0.2)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.grid(visible=False)
    signs, verdicts = cycle(_SIGNS), {one["verdict"] for one in results}
    said = [f"{sign} {_name(one)}: {one['verdict']}" for sign, one in zip(signs, results, strict=False)]
    color = _color(*verdicts) if len(verdicts) == 1 else INK
    axes.set_title("   ".join((results[0]["claim"], *said)), color=color, fontsize=7)


@dataclass
class _Marks:
    """What a panel shows, kept until it can be drawn in few strokes: a file's size is that of its strokes."""

    bounds: list[tuple[float, float, float]] = field(default_factory=list)
    intervals: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    dots: dict[tuple[str, str, bool], list[tuple[float, float]]] = field(default_factory=dict)
    reported: list[tuple[float, float]] = field(default_factory=list)

    def add(self, test: Result, marker: str, place: float) -> None:
        color = _color(test["verdict"])
        if test["interval"] is not None:
            self.intervals.setdefault(color, []).append((place, *test["interval"]))
        if test["value"] is not None:
            self.dots.setdefault((color, marker, test["decides"]), []).append((test["value"], place))
        if test["reported"] is not None:
            self.reported.append((test["reported"], place))

    def draw(self, axes: Axes) -> None:
        axes.vlines(*zip(*self.bounds, strict=True), color=MUTED, linewidth=1, linestyle="dashed")
        for color, intervals in self.intervals.items():
            axes.hlines(*zip(*intervals, strict=True), color=color, linewidth=1.6)
        for (color, marker, decides), dots in self.dots.items():
            face = color if decides else "w"
            axes.plot(
                *zip(*dots, strict=True), marker, color=color, markersize=4.5, markerfacecolor=face, linestyle="none"
            )
        if self.reported:
            axes.plot(*zip(*self.reported, strict=True), "|", color=INK, markersize=9, linestyle="none")


def _name(found: Result) -> str:
    return str(found["on"]).rpartition("/")[2]


def _color(verdict: str) -> str:
    assert verdict in VERDICTS
    return COLORS.get(verdict, MUTED)


def _height(test: Result, results: int) -> float:
    """Of a test's row, in lines of its label."""
    return max(len(fill(test["effect"], _LETTERS).splitlines()), _ROW * results)
