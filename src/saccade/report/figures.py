"""The figures of a comparison's report as elements of its page: narrow, so that they are read at 600 pixels too."""

from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import PowerNorm, to_rgba
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .drawing import IN_CELL, SHARES, canvas, inline
from .palette import FACT, GRID, INK, MUTED, PAPER, marks
from .wording import Row

_WIDTH, _LINE, _FONT = 6.4, 0.245, 9  # inches, inches of a policy at a budget, points
_WRITTEN = 24
"""Layers up to which a cell of a heat map has room for its number."""
_CELLS: dict[str, Any] = {"aspect": "auto", "interpolation": "none"}
_OVER = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}
_STRONG = 0.55
"""Shares from which on a colour is too strong for dark letters."""


def accuracy(rows: Sequence[Row]) -> str:
    """Share of right answers with intervals, a line per policy and budget; dense as a band."""
    sparse = [row for row in _sparse(rows) if row["n"]]
    with canvas(_WIDTH, _height(sparse), _FONT) as figure:
        axes = figure.add_subplot()
        for row in rows:
            if row["label"] == "dense" and row["n"]:
                axes.axvspan(*row["interval"], color=MUTED, alpha=0.18, linewidth=0, label="dense, its interval")
                axes.axvline(row["correct"] / row["n"], color=MUTED, linestyle="dashed", linewidth=1.2)
        drawn = marks(row["label"] for row in sparse)
        for line, row in enumerate(sparse):
            mark = drawn[row["label"]]
            axes.plot(row["interval"], [line, line], color=mark["color"], linewidth=1.6, alpha=0.7)
            axes.plot(row["correct"] / row["n"], line, **mark, markersize=6.5, linestyle="none")
        _name_budgets(axes, sparse)
        axes.set_xlim(-0.02, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_title("answers right, 95% intervals; band: dense attention's")
        return inline(figure, "accuracy")


def times(rows: Sequence[Row]) -> str:
    """Milliseconds per token, a bar per policy and budget; dense as a line."""
    sparse = [row for row in _sparse(rows) if row["ms_per_token"]]
    with canvas(_WIDTH, _height(sparse), _FONT) as figure:
        axes = figure.add_subplot()
        drawn = marks(row["label"] for row in _sparse(rows))
        for line, row in enumerate(sparse):
            axes.barh(line, row["ms_per_token"], height=0.55, color=drawn[row["label"]]["color"], alpha=0.75)
            told = f" {row['speedup']:.2f}x" if row["speedup"] else ""
            axes.text(row["ms_per_token"], line, told, va="center", fontsize=_FONT - 1, color=INK, bbox=_OVER)
        for row in rows:
            if row["label"] == "dense" and row["ms_per_token"]:
                axes.axvline(row["ms_per_token"], color=MUTED, linestyle="dashed", linewidth=1.2)
        _name_budgets(axes, sparse)
        axes.margins(x=0.1)
        axes.set_xlim(left=0)
        axes.set_title("milliseconds per token; dashed: dense attention")
        return inline(figure, "times")


def recalls(rows: Sequence[Row], measure: str) -> str:
    """`recall` or `token_recall` of heads with a set as colours: policies and budgets down, layers across.

    Grey where no head has one.
    """
    sparse = [row for row in _sparse(rows) if row[measure] is not None]
    values = numpy.array([row[f"{measure}_per_layer"] for row in sparse], dtype=float)
    with canvas(_WIDTH, _height(sparse) + 0.55, _FONT) as figure:
        axes = figure.add_subplot()
        if sparse:
            image = axes.imshow(values, SHARES, vmin=0, vmax=1, **_CELLS)
            bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.02)
            bar.ax.xaxis.set_major_formatter(PercentFormatter(1.0))
            bar.outline.set_visible(False)
            for line, row in enumerate(sparse):
                axes.text(values.shape[1] - 0.3, line, f"{row[measure]:.0%}", va="center", fontsize=_FONT - 1)
                if line and row["label"] != sparse[line - 1]["label"]:
                    axes.axhline(line - 0.5, color=PAPER, linewidth=2.5)
            axes.text(values.shape[1] - 0.3, -0.75, "mean", va="bottom", fontsize=_FONT - 1)
        if sparse and values.shape[1] <= _WRITTEN:
            for (line, layer), value in numpy.ndenumerate(values):
                if not numpy.isnan(value):
                    color = IN_CELL if value > _STRONG else INK
                    axes.text(
                        layer, line, f"{100 * value:.0f}", ha="center", va="center", fontsize=_FONT - 2, color=color
                    )
        _name_budgets(axes, sparse)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.xaxis.tick_top()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=24))
        kind = measure.removeprefix("recall").replace("_", " ") or "attention recall"
        axes.set_title(f"{kind} of heads with a set, by layer")
        return inline(figure, measure)


def gazes(own: Sequence[Row], name: str) -> str:
    """Where a policy looked: questions down, by the depth of their fact; the document across."""
    own = sorted(own, key=lambda gaze: gaze["depth"])
    shares = numpy.array([gaze["bins"] for gaze in own])
    count, bins = shares.shape
    with canvas(4.2, min(max(count * 0.034, 0.8), 3.0) + 0.3, 8) as figure:
        axes = figure.add_subplot()
        _looks(axes, shares, extent=(0, bins, count, 0))
        width = bins / 50
        boxes = [Rectangle((gaze["depth"] * bins - width / 2, line), width, 1) for line, gaze in enumerate(own)]
        fills = [to_rgba(FACT, gaze["fact_held"]) for gaze in own]
        axes.add_collection(PatchCollection(boxes, facecolor=PAPER, linewidth=0))
        axes.add_collection(PatchCollection(boxes, facecolor=fills, edgecolor=FACT, linewidth=0.7))
        wrong = [line + 0.5 for line, gaze in enumerate(own) if not gaze["correct"]]
        axes.scatter([bins * 1.015] * len(wrong), wrong, marker="x", s=8, linewidths=0.9, color=INK, clip_on=False)
        axes.set_xlim(0, bins)
        axes.set_xticks([0, bins / 4, bins / 2, 3 * bins / 4, bins], ["start", "25%", "50%", "75%", "end"])
        return inline(figure, name)


def gaze_bar() -> str:
    """What the colours of `gazes` mean."""
    with canvas(4.2, 0.62, 8) as figure:
        axes = figure.add_subplot()
        _looks(axes, numpy.linspace(0, 1, 256)[None], extent=(0, 1, 0, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("of the sets hold a token there")
        return inline(figure, "gaze-bar")


def _looks(axes: Axes, shares: Any, extent: tuple[float, float, float, float]) -> None:
    """Shares in a frame; faint looks matter as much as strong ones, hence the power."""
    axes.imshow(shares, SHARES, norm=PowerNorm(0.7, vmin=0, vmax=1), extent=extent, **_CELLS)
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.spines[:].set(visible=True, color=GRID)


def _name_budgets(axes: Axes, rows: Sequence[Row]) -> None:
    """A line of the picture per row, from above: a policy's name once, and every budget."""
    names = [f"{row['budget']:,}" if row["budget"] is not None else "" for row in rows]
    for line, row in enumerate(rows):
        if not line or row["label"] != rows[line - 1]["label"]:
            names[line] = f"{row['label']}   {names[line]}".rstrip()
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)


def _height(rows: Sequence[Row]) -> float:
    return max(_LINE * len(rows), 0.6) + 0.75


def _sparse(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["label"] != "dense"]
