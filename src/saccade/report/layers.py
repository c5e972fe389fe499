"""Table and picture of `saccade calibrate layers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.table import Table

from ..calibrate.reselecting import name
from ..files import replace_text
from .drawing import as_svg, canvas, headline, heat_map, number_places
from .labels import full_layers
from .palette import FACT, GRID, INK
from .table import new_table
from .wording import RECALL, Row, about, asked, grouped, mean_recall, number

PICTURE = "layers.svg"

Candidate = tuple[int, ...]
Values = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

_TALLEST = 11.0
"""Inches that the rows of all layers share at most."""
_ROW = 0.21
_POINTS = 72


def layer_table(results: Mapping[str, Any]) -> Table:
    """Right answers of every candidate and budget, beside the means; the verdict below."""
    dense, chosen = results["dense"], tuple(results["chosen"])
    asked_of = f"{about(results)}, {asked(results, dense['n'], dense['correct'])}"
    counts = [f"right\nof {dense['n']:,}\nat {budget:,}" for budget in results["budgets"]]
    columns = ("layer", *counts, RECALL, "")
    title = f"layers that select again under {results['policy']}: {asked_of}"
    table = new_table(title, columns, ("layer", ""), _verdict(results))
    size = 1
    for candidate, rows in _outcomes(results).items():
        if len(candidate) > size:
            table.add_section()
        size = max(size, len(candidate))
        cells = (*(f"{row['correct']:,}" for row in rows), number(mean_recall(rows), "{:.3f}"))
        taken = candidate == chosen
        table.add_row(name(candidate), *cells, "chosen" if taken else "", style="bold" if taken else None)
    return table


def _verdict(results: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    lines = [f"chosen: {_named(results['chosen'])}, by right answers over all budgets, then recall of heads with a set"]
    for step in results["further_layers"]:
        taken = "taken" if step["taken"] else "not taken: 0.05 or more"
        lines.append(f"further layer: {name(step['from'])} -> {name(step['to'])}, p = {step['p']:.3g}, {taken}")
    return lines


def layer_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Draw the search into the results folder, heat maps, layer by budget; returns the picture's path."""
    budgets, dense, outcomes = results["budgets"], results["dense"], _outcomes(results)
    layers = full_layers(results.get("environment", {}), len(dense["recall_per_layer"]))
    # No layer, every layer with full attention whether tried or not, and the best of each further round.
    shown = [(), *((layer,) for layer in layers), *(tuple(step["to"]) for step in results["further_layers"])]
    unknown = [numpy.nan] * len(budgets)
    right, recall = (
        numpy.array([[row[what] for row in outcomes.get(one, ())] or unknown for one in shown], dtype=float)
        for what in ("accuracy", "recall")
    )
    counts = [[str(row["correct"]) for row in outcomes.get(one, ())] for one in shown]
    widths = [max(0.55 * len(budgets), 1.3)] * 2
    height = min(_ROW * len(shown), _TALLEST)
    with canvas(sum(widths) + 0.3 * len(widths) + 1.4, max(height, 1.2) + 1.3) as figure:
        panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        points = _POINTS * height / len(shown)
        _shares(panels[0], f"right of {dense['n']:,}\n(dense: {dense['correct']:,})", right, "Blues", points, counts)
        _shares(panels[1], RECALL, recall, "Greens", points, _written(recall))
        for axes in panels:
            slanted = {"rotation": 45} if len(budgets) > 3 else {}
            number_places(axes, budgets, **slanted)
            axes.set_xlabel("budget")
        chosen = shown.index(tuple(results["chosen"]))
        frame: dict[str, Any] = {"fill": False, "edgecolor": FACT, "linewidth": 1.8, "clip_on": False, "zorder": 5}
        for axes in panels:
            axes.add_patch(Rectangle((0, chosen - 0.5), 1, 1, transform=axes.get_yaxis_transform(), **frame))
        _layer_ticks(panels[0], list(map(name, shown)), chosen, points)
        headline(figure, f"{results['policy']}: {about(results)}; chosen: {_named(results['chosen'])}")
        replace_text(folder / PICTURE, as_svg(figure))
    return folder / PICTURE


def _shares(axes: Axes, title: str, values: Values, colors: str, points: float, texts: Sequence[Sequence[str]]) -> None:
    """Shares as colours, grey where there are none; `points` is the height of a row."""
    heat_map(axes, values, matplotlib.colormaps[colors].with_extremes(bad=GRID), vmin=0, vmax=1)
    axes.set_title(title)
    axes.tick_params(length=0)
    size = min(0.62 * points, 8)
    for line, cells in enumerate(texts):
        for column, text in enumerate(cells):
            color = "white" if values[line, column] > 0.6 else INK
            if text and size >= 4:
                axes.text(column, line, text, ha="center", va="center", fontsize=size, color=color)


def _layer_ticks(axes: Axes, names: Sequence[str], chosen: int, points: float) -> None:
    """Names of rows, as many as there is room for, the chosen one always."""
    size = min(max(0.75 * points, 6), 8.5)
    step = -(-size // points)
    places = [line for line in range(len(names)) if line == chosen or (line % step == 0 and abs(line - chosen) >= step)]
    axes.set_yticks(places, [names[line] for line in places], fontsize=size)
    axes.set_ylabel("layer that selects again")
    axes.get_yticklabels()[places.index(chosen)].set(color=FACT, fontweight="bold")


def _written(values: Values) -> list[list[str]]:
    return [["" if numpy.isnan(value) else f"{value:.2f}" for value in line] for line in values]


def _outcomes(results: Mapping[str, Any]) -> dict[Candidate, list[Row]]:
    """Rows by candidate, in the order of the budgets."""
    return grouped(results["rows"], lambda row: tuple(row["reselect"]))


def _named(reselect: Sequence[int]) -> str:
    return f"layer{'s' if reselect[1:] else ''} {name(reselect)}" if reselect else "no further layer"
