"""Table and picture of `saccade calibrate layers` by the probe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from rich.table import Table

from ..adapters.hf.probe import KINDS
from ..calibrate.reselecting import name
from ..files import replace_text
from .drawing import as_svg, canvas, headline
from .palette import FACT, GRID, INK
from .table import new_table
from .wording import number

PICTURE = "layers.svg"
UNIT = "KL(dense ‖ policy) of key tokens, nats"
_COLORS = {"natural": "#4c78a8", "repeat": "#54a24b"}


def probe_table(results: Mapping[str, Any]) -> Table:
    """What every candidate loses on key tokens, by kind of text, and how often its likeliest token is dense's."""
    columns = ("layer", "budget", *KINDS, "sum", "95%", *(f"equal,\n{kind}" for kind in KINDS), "")
    about = (
        f"{results['model']}, {results['passages']} texts of {results['tokens']:,} tokens, {results['keys']} key tokens"
    )
    lines = [f"{UNIT}; chosen: {name(results['chosen'])}", *results["notes"]]
    if results["margin"] is not None:
        low, high = results["margin"]
        lines.insert(1, f"second: {name(results['second'])}, worse by {low:.3f} to {high:.3f}")
    table = new_table(f"layers that select again under {results['policy']}: {about}", columns, ("layer", ""), lines)
    for row in results["rows"]:
        taken = row["reselect"] == results["chosen"]
        ends = "-" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"])
        losses = (number(row["key_kl"][kind], "{:.3f}") for kind in KINDS)
        equal = (number(row["key_equal"][kind], "{:.2f}") for kind in KINDS)
        cells = (*losses, f"{row['merit']:.3f}", ends, *equal, "chosen" if taken else "")
        table.add_row(name(row["reselect"]), f"{row['budget']:,}", *cells, style="bold" if taken else None)
    return table


def probe_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Draw the measure by layer, both kinds of text stacked, a panel for each budget; returns the picture's path."""
    budgets = results["budgets"]
    with canvas(1.5 + max(3.5, 0.28 * len(results["rows"])), 2.4 * len(budgets) + 0.8) as figure:
        panels = figure.subplots(len(budgets), 1, squeeze=False)[:, 0]
        for axes, budget in zip(panels, budgets, strict=True):
            rows = [row for row in results["rows"] if row["budget"] == budget]
            places, below = numpy.arange(len(rows)), numpy.zeros(len(rows))
            for kind in KINDS:
                heights = numpy.array([row["key_kl"][kind] or 0.0 for row in rows])
                axes.bar(places, heights, bottom=below, color=_COLORS[kind], width=0.7, label=f"{kind} text")
                below += heights
            if all(row["interval"] is not None for row in rows):
                ends = numpy.array([row["interval"] for row in rows]).T
                axes.errorbar(places, below, numpy.abs(ends - below), fmt="none", ecolor=INK, elinewidth=1, capsize=2)
            axes.set_ylabel("nats" if len(budgets) == 1 else f"nats at {budget:,}")
            axes.grid(axis="y", color=GRID, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.set_xticks(places, [name(row["reselect"]) for row in rows])
            for label, row in zip(axes.get_xticklabels(), rows, strict=True):
                if row["reselect"] == results["chosen"]:
                    label.set(color=FACT, fontweight="bold")
        panels[0].legend(frameon=False)
        panels[-1].set_xlabel("layer that selects again")
        headline(figure, f"{results['policy']}, {results['model']}: {UNIT}; less is better")
        replace_text(folder / PICTURE, as_svg(figure))
    return folder / PICTURE
