"""Table and picture of `saccade calibrate layers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.table import Table

from .drawing import as_svg, canvas, headline, write_picture
from .palette import FACT, GRID, INK
from .table import new_table
from .wording import NOTHING, Row, about, asked, grouped, number

PICTURE = "layers.svg"

Candidate = tuple[int, ...]
Values = numpy.ndarray[Any, numpy.dtype[numpy.float64]]

_TALLEST = 11.0
"""Inches that the rows of all layers share at most."""
_ROW = 0.21
_POINTS = 72


def layer_table(results: Mapping[str, Any]) -> Table:
    """Right answers of every candidate and budget, beside the means and the cheap guesses; the verdict below."""
    dense, budgets, chosen = results["dense"], results["budgets"], tuple(results["chosen"])
    title = (
        f"layers that select again under {results['policy']}: {about(results)}, "
        f"{asked(results, dense['n'], dense['correct'])}"
    )
    counts = [f"right\nof {dense['n']:,}\nat {budget:,}" for budget in budgets]
    columns = ("layer", *counts, "mean\nrecall", "gold\nmass", "predicted\nrecall", "")
    table = new_table(title, columns, ("layer", ""), _verdict(results))
    found = _outcomes(results)
    sizes = {0}
    for candidate, rows in found.items():
        if len(candidate) > 1 and len(candidate) not in sizes:
            table.add_section()
        sizes.add(len(candidate))
        predicted = results["predicted_recall"].get(_name(candidate))
        gold = results["gold_mass"][candidate[0]] if results["gold_mass"] and len(candidate) == 1 else None
        table.add_row(
            _name(candidate),
            *(f"{row['correct']:,}" for row in rows),
            f"{fmean(row['recall'] for row in rows):.3f}",
            number(gold, "{:.3f}"),
            NOTHING if predicted is None else f"{fmean(predicted):.3f}",
            "chosen" if candidate == chosen else "",
            style="bold" if candidate == chosen else None,
        )
    return table


def layer_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Draw the search into the results folder; returns the picture's path."""
    return write_picture(folder / PICTURE, _picture(results))


def _verdict(results: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    lines = [f"chosen: {_named(results['chosen'])}, by right answers over all budgets, then by mean recall"]
    for step in results["further_layers"]:
        taken = "taken" if step["taken"] else "not taken: 0.05 or more"
        lines.append(f"further layer: {_name(step['from'])} -> {_name(step['to'])}, p = {step['p']:.3g}, {taken}")
    if results["rank_correlation"]:
        lines.append("rank correlation over single layers, of what one dense pass says with what was measured:")
    for proxy, found in results["rank_correlation"].items():
        lines.append(
            f"  {proxy.replace('_', ' ')}: {number(found['with_accuracy'], '{:+.2f}')} with right answers, "
            f"{number(found['with_recall'], '{:+.2f}')} with recall; its best layer is {found['its_best']}"
        )
    if results["gold_mass"] is None:
        lines.append("no gold mass: no answer stands in its text")
    return lines


def _picture(results: Mapping[str, Any]) -> str:
    """Measured heat maps, layer by budget, and beside them what one dense pass says of the same layers."""
    budgets, dense, outcomes = results["budgets"], results["dense"], _outcomes(results)
    layers = len(dense["recall_per_layer"])
    shown = _shown(results, layers)
    right, recall, predicted = (numpy.full((len(shown), len(budgets)), numpy.nan) for _ in range(3))
    counts = [[""] * len(budgets) for _ in shown]
    for line, candidate in enumerate(shown):
        if candidate in outcomes:
            right[line] = [row["accuracy"] for row in outcomes[candidate]]
            recall[line] = [row["recall"] for row in outcomes[candidate]]
            counts[line] = [str(row["correct"]) for row in outcomes[candidate]]
            predicted[line] = results["predicted_recall"].get(_name(candidate), numpy.nan)
    heads = results["gold_mass_per_head"]
    widths = [max(0.55 * len(budgets), 1.3)] * 3 + ([] if heads is None else [min(max(0.12 * len(heads[0]), 1.6), 3.2)])
    height = min(_ROW * len(shown), _TALLEST)
    with canvas(sum(widths) + 0.3 * len(widths) + 1.4, max(height, 1.2) + 1.3) as figure:
        # Right answers, recall, predicted recall, gold mass if any answer has a place.
        panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
        points = _POINTS * height / len(shown)
        _heat_map(panels[0], right, "Blues", counts, points)
        _heat_map(panels[1], recall, "Greens", _written(recall), points)
        _heat_map(panels[2], predicted, "Greens", _written(predicted), points)
        panels[0].set_title(f"right of {dense['n']:,}\n(dense: {dense['correct']:,})")
        panels[1].set_title("measured\nrecall")
        panels[2].set_title("predicted\nrecall")
        for axes in panels[:3]:
            slanted = {"rotation": 45} if len(budgets) > 3 else {}
            axes.set_xticks(range(len(budgets)), [f"{budget:,}" for budget in budgets], **slanted)
            axes.set_xlabel("budget")
        if heads is not None:
            mass = numpy.full((len(shown), len(heads[0])), numpy.nan)
            mass[1 : 1 + layers] = heads
            image = _heat_map(panels[3], mass, "Oranges", None, points)
            panels[3].set_title("attention on the answer\n(gold mass)")
            panels[3].set_xlabel("query head")
            panels[3].xaxis.get_major_locator().set_params(integer=True)
            figure.colorbar(image, ax=panels[3], fraction=0.08, aspect=30, shrink=min(1.0, 3 / height))
        chosen = shown.index(tuple(results["chosen"]))
        for axes in panels:
            axes.add_patch(
                Rectangle(
                    (0, chosen - 0.5), 1, 1, transform=axes.get_yaxis_transform(), fill=False, edgecolor=FACT,
                    linewidth=1.8, clip_on=False, zorder=5,
                )
            )  # fmt: skip
        _layer_ticks(panels[0], [_name(candidate) for candidate in shown], chosen, points)
        headline(figure, f"{results['policy']}: {about(results)}; chosen: {_named(results['chosen'])}")
        return as_svg(figure)


def _shown(results: Mapping[str, Any], layers: int) -> list[Candidate]:
    """Rows of the picture: no layer, every layer whether tried or not, and the best of each further round."""
    further = [tuple(step["to"]) for step in results["further_layers"]]
    return [(), *((layer,) for layer in range(layers)), *further]


def _heat_map(axes: Axes, values: Values, colors: str, texts: Sequence[Sequence[str]] | None, points: float) -> Any:
    """Shares as colours, grey where there are none; `points` is the height of a row."""
    image = axes.imshow(
        values,
        cmap=matplotlib.colormaps[colors].with_extremes(bad=GRID),
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    axes.grid(visible=False)
    axes.tick_params(length=0)
    size = min(0.62 * points, 8)
    for line, cells in enumerate(texts or ()):
        for column, text in enumerate(cells):
            color = "white" if values[line, column] > 0.6 else INK
            if text and size >= 4:
                axes.text(column, line, text, ha="center", va="center", fontsize=size, color=color)
    return image


def _layer_ticks(axes: Axes, names: Sequence[str], chosen: int, points: float) -> None:
    """Names of rows, as many as there is room for, the chosen one always."""
    size = min(max(0.75 * points, 6), 8.5)
    step = -(-size // points)
    places = [line for line in range(len(names)) if line == chosen or (line % step == 0 and abs(line - chosen) >= step)]
    axes.set_yticks(places, [names[line] for line in places], fontsize=size)
    axes.set_ylabel("layer that selects again")
    mark = axes.get_yticklabels()[places.index(chosen)]
    mark.set_color(FACT)
    mark.set_fontweight("bold")


def _written(values: Values) -> list[list[str]]:
    return [["" if numpy.isnan(value) else f"{value:.2f}" for value in line] for line in values]


def _outcomes(results: Mapping[str, Any]) -> dict[Candidate, list[Row]]:
    """Rows by candidate, in the order of the budgets."""
    return grouped(results["rows"], lambda row: tuple(row["reselect"]))


def _name(reselect: Sequence[int]) -> str:
    return "+".join(map(str, reselect)) or "none"


def _named(reselect: Sequence[int]) -> str:
    layers = "layer" if len(reselect) == 1 else "layers"
    return f"{layers} {_name(reselect)}" if reselect else "no further layer"
