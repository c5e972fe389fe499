"""The figures of a report, drawn without a display and returned as SVG data URIs."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .drawing import as_svg, canvas, heat_map, side_by_side, with_intervals
from .palette import DENSE, FACT, GRID, INK, marks
from .wording import Row, short

_WIDTH, _FONT = 10.0, 10  # inches, points; the page scales figures to its own width
_LOOKS = LinearSegmentedColormap.from_list("looks", ["#ffffff", "#c6dbef", "#4a90c4", "#08306b"])


def accuracy_against_budget(rows: Sequence[Row]) -> str:
    """Share of right answers with intervals, policies side by side at each budget, dense as a band."""
    with canvas(_WIDTH, 4.2, _FONT) as figure:
        axes = figure.add_subplot()
        sparse = _sparse(rows)
        budgets = _budgets(sparse)
        labels = list(dict.fromkeys(row["label"] for row in sparse))
        drawn = marks(labels)
        _dense_band(axes, rows, len(budgets))
        for number, label in enumerate(labels):
            own = [row for row in sparse if row["label"] == label and row["n"]]
            own.sort(key=lambda row: budgets.index(row["budget"]))
            x = [budgets.index(row["budget"]) + side_by_side(number, len(labels)) for row in own]
            y = [row["correct"] / row["n"] for row in own]
            ends = [row["interval"] for row in own]
            axes.plot(x, y, color=drawn[label].color, linewidth=1, alpha=0.45)
            with_intervals(axes, x, y, ends, drawn[label], markersize=7, capsize=3, label=short(label))
        axes.set_xticks(range(len(budgets)), [_named(budget) for budget in budgets])
        axes.set_xlim(-0.5, max(len(budgets), 1) - 0.5)
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("budget (tokens a sparse head attends to)")
        axes.set_ylabel("answers right")
        figure.legend(loc="outside right upper")
        return _data_uri(figure)


def recalls_per_layer(rows: Sequence[Row]) -> str:
    """Both recalls of heads with a set over the layers that have some, one column of panels per budget."""
    sparse = [row for row in _sparse(rows) if row["recall"] is not None]
    budgets = _budgets(sparse)
    with canvas(_WIDTH, 7.2, _FONT) as figure:
        panels = figure.subplots(2, max(len(budgets), 1), sharex=True, sharey=True, squeeze=False)
        order = list(dict.fromkeys(row["label"] for row in sparse))
        drawn = marks(order)
        handles = {}
        for row in sparse:
            label, column = row["label"], budgets.index(row["budget"])
            # Policies that agree would hide each other.
            shift = side_by_side(order.index(label), len(order), apart=0.06, room=0.5)
            for axes, measure in zip(panels[:, column], ("recall_per_layer", "token_recall_per_layer"), strict=True):
                layers, style = numpy.arange(len(row[measure])) + shift, drawn[label].style
                recalls = numpy.array(row[measure], dtype=float)  # gaps where no head has a set
                (handles[label],) = axes.plot(layers, recalls, **style, markersize=5, linewidth=1.4, alpha=0.9)
        for axes in panels.flat:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_ylim(-0.03, 1.03)
        for axes, budget in zip(panels[0], budgets, strict=False):
            axes.set_title(_named(budget, "budget "))
        for axes in panels[1]:
            axes.set_xlabel("layer")
        for axes, measure in zip(panels[:, 0], ("attention recall", "token recall"), strict=True):
            axes.set_ylabel(f"{measure} of heads with a set")
        figure.legend(list(handles.values()), list(map(short, handles)), loc="outside lower center", ncols=4)
        return _data_uri(figure)


def gaze_maps(rows: Sequence[Row], gazes: Sequence[Row]) -> str:
    """Where each policy looked (columns: the document) for each question (rows: by the depth of its fact)."""
    looked = {gaze["spec"] for gaze in gazes}
    sparse = [row for row in rows if row["spec"] in looked]
    labels = list(dict.fromkeys(row["label"] for row in sparse))
    budgets = [budget for budget in _budgets(sparse) if budget is not None]
    questions = len(gazes) / max(len(looked), 1)
    height = min(max(questions * 0.04, 0.9), 4.0) + 0.55
    with canvas(_WIDTH, height * len(labels) + 0.8, _FONT) as figure:
        panels = figure.subplots(max(len(labels), 1), max(len(budgets), 1), squeeze=False, sharex=True)
        for axes in panels.flat:
            axes.set_visible(False)
        image = None
        for row in sparse:
            # Whoever has no budget has a line of its own, and all columns are free.
            line, column = labels.index(row["label"]), 0 if row["budget"] is None else budgets.index(row["budget"])
            axes = panels[line][column]
            axes.set_visible(True)
            own = sorted((gaze for gaze in gazes if gaze["spec"] == row["spec"]), key=lambda gaze: gaze["depth"])
            image = _gaze_map(axes, own)
            held = "" if row["fact_held"] is None else f", fact in {row['fact_held']:.0%} of the sets"
            axes.set_title(f"{short(row['label'])}\n{_named(row['budget'], 'budget ')}{held}", fontsize=9)
            if line == len(labels) - 1:
                axes.set_xlabel("place in the document")
        figure.supylabel("questions, sorted by the depth of their fact", fontsize=10)
        if image is not None:
            bar = figure.colorbar(image, ax=panels, shrink=min(0.5, 2.4 / len(labels)), aspect=24, pad=0.015)
            bar.set_label("share of the sets that hold a token there")
            bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        return _data_uri(figure)


def _gaze_map(axes: Axes, gazes: Sequence[Row]) -> Any:
    shares = numpy.array([gaze["bins"] for gaze in gazes])
    count, bins = shares.shape
    # Faint looks matter as much as strong ones, hence the power.
    image = heat_map(axes, shares, _LOOKS, norm=PowerNorm(0.7, vmin=0, vmax=1), extent=(0, bins, count, 0))
    width = bins / 50
    boxes = [Rectangle((gaze["depth"] * bins - width / 2, line), width, 1) for line, gaze in enumerate(gazes)]
    fills = [to_rgba(FACT, gaze["fact_held"]) for gaze in gazes]
    axes.add_collection(PatchCollection(boxes, facecolor="white", linewidth=0))
    axes.add_collection(PatchCollection(boxes, facecolor=fills, edgecolor=FACT, linewidth=0.8))
    wrong = [line + 0.5 for line, gaze in enumerate(gazes) if not gaze["correct"]]
    axes.scatter([bins * 1.012] * len(wrong), wrong, marker="x", s=9, linewidths=0.9, color=INK, clip_on=False)
    axes.set_xlim(0, bins)
    axes.set_xticks([0, bins / 4, bins / 2, 3 * bins / 4, bins], ["start", "25%", "50%", "75%", "end"])
    axes.set_yticks([])
    axes.spines[:].set(visible=True, color=GRID)
    return image


def _dense_band(axes: Axes, rows: Sequence[Row], budgets: int) -> None:
    dense = next((row for row in rows if row["label"] == "dense" and row["n"]), None)
    if dense is None:
        return
    low, high = dense["interval"]
    axes.axhspan(low, high, color=DENSE.color, alpha=0.12, linewidth=0)
    share = dense["correct"] / dense["n"]
    ends = [(-0.5, share), (max(budgets, 1) - 0.5, share)]
    axes.add_collection(LineCollection([ends], colors=DENSE.color, linestyles="dashed", label="dense (all tokens)"))


def _sparse(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["label"] != "dense"]


def _budgets(rows: Sequence[Row]) -> list[int | None]:
    """The budgets there are; policies without one come last, at a place of their own."""
    return sorted({row["budget"] for row in rows}, key=lambda budget: (budget is None, budget or 0))


def _named(budget: int | None, before: str = "") -> str:
    return "no fixed budget" if budget is None else f"{before}{budget:,}"


def _data_uri(figure: Figure) -> str:
    """The figure as SVG inside the page: nothing is fetched when it is read."""
    return "data:image/svg+xml;base64," + base64.b64encode(as_svg(figure).encode()).decode("ascii")
