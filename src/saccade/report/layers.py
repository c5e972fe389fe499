"""Table and picture of `saccade calibrate layers`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy
from rich.table import Table

from ..calibrate.layers import name
from .drawing import as_svg, canvas, headline
from .palette import FACT, GRID, INK
from .table import fill, new_table
from .wording import Columns, Row, number

PICTURE, MOST = "layers.svg", 100
"""The picture's file; names of layers in it."""
UNIT = "KL(dense ‖ policy) of key tokens, nats"
KINDS = {"natural": "#4c78a8", "repeat": "#54a24b"}
"""Of text, and their colours."""


def layer_table(results: Mapping[str, Any]) -> Table:
    """What every candidate loses on key tokens, by kind of text, and what it answers; the verdict below."""
    dense = results.get("dense")
    columns: Columns = {
        "layer": lambda row: name(row["reselect"]),
        "budget": lambda row: f"{row['budget']:,}",
        **{kind: _number("key_kl", kind, "{:.3f}") for kind in KINDS},
        "sum": lambda row: f"{row['merit']:.3f}",
        "95%": lambda row: "-" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"]),
        **{f"equal,\n{kind}": _number("key_equal", kind, "{:.2f}") for kind in KINDS},
        **({f"right\nof {dense['n']:,}": lambda row: f"{row['asked']['correct']:,}"} if dense else {}),
        "in a row": lambda row: f"{row['walked']['merit']:.3f}" if "walked" in row else "-",
        "": lambda row: "chosen" if row["chosen"] else "",
    }
    about = f"{results['passages']} texts of {results['tokens']:,} tokens, {results['keys']:,} key tokens"
    walk = f"in a row: after up to {results['walk']} steps on what the policy has left, of the best of one step"
    lines = [f"{UNIT}; chosen: {_named(results['chosen'])}", walk]
    if results["margin"] is not None:
        low, high = results["margin"]
        lines.append(f"second: {_named(results['second'])}, worse by {low:.3f} to {high:.3f}")
    for step in results["further_layers"]:
        taken = "taken" if step["taken"] else "not taken: it may gain nothing"
        lines.append(f"further layer: {name(step['from'])} -> {name(step['to'])}, {taken}")
    if dense is not None:
        lines.append(f"dense attention answers {dense['correct']:,}")
    title = f"layers that select again under {results['policy']}: {results['model']}, {about}"
    table = new_table(title, columns, ("layer", ""), [*lines, *results["notes"]])
    rows = [{**row, "chosen": row["reselect"] == results["chosen"]} for row in results["rows"]]
    return fill(table, rows, columns, bold="chosen")


def _number(measure: str, kind: str, form: str) -> Callable[[Row], str]:
    return lambda row: number(row[measure][kind], form)


def layer_picture(results: Mapping[str, Any]) -> str:
    """The measure by layer, both kinds of text stacked, a panel for each budget, as SVG."""
    budgets = results["budgets"]
    width = min(max(6.0, 1.5 + 0.3 * len(results["rows"]) / len(budgets)), 30.0)
    with canvas(width, 2.2 * len(budgets) + 0.8) as figure:
        panels = figure.subplots(len(budgets), 1, squeeze=False)[:, 0]
        for axes, budget in zip(panels, budgets, strict=True):
            rows = [row for row in results["rows"] if row["budget"] == budget]
            places, below = numpy.arange(len(rows)), numpy.zeros(len(rows))
            for kind in KINDS:
                heights = numpy.array([row["key_kl"][kind] or 0.0 for row in rows])
                axes.bar(places, heights, bottom=below, color=KINDS[kind], width=0.7, label=f"{kind} text")
                below += heights
            if all(row["interval"] is not None for row in rows):
                ends = numpy.array([row["interval"] for row in rows]).T
                axes.errorbar(places, below, numpy.abs(ends - below), fmt="none", ecolor=INK, elinewidth=1, capsize=2)
            axes.set_ylabel(f"nats at {budget:,}")
            axes.grid(axis="y", color=GRID, linewidth=0.6)
            axes.set_axisbelow(True)
            chosen, step = [row["reselect"] for row in rows].index(results["chosen"]), -(-len(rows) // MOST)
            shown = [n for n in range(len(rows)) if n == chosen or (n % step == 0 and abs(n - chosen) >= step)]
            axes.set_xticks(shown, [name(rows[place]["reselect"]) for place in shown])
            axes.get_xticklabels()[shown.index(chosen)].set(color=FACT, fontweight="bold")
        panels[0].legend(frameon=False)
        panels[-1].set_xlabel("layer that selects again")
        headline(figure, f"{results['policy']}, {results['model']}: {UNIT}; chosen: {_named(results['chosen'])}")
        return as_svg(figure)


def _named(reselect: Any) -> str:
    return f"layer{'s' if reselect[1:] else ''} {name(reselect)}" if reselect else "no further layer"
