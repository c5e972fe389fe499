"""Table and picture of `saccade calibrate heads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from rich.table import Table

from ..calibrate.gates import KINDS
from ..eval.interval import wilson
from ..eval.output import read_lines
from ..files import replace_text
from .drawing import as_svg, canvas, number_places, side_by_side, with_intervals
from .labels import full_layers
from .palette import INK, MUTED, marks
from .table import fill, new_table
from .wording import RECALL, Columns, Row, about, asked, grouped, mean_recall, number

PICTURE = "heads.svg"

_SHARP = 200  # dots per inch of the heat maps, which would be too many paths
_LABELS = 12

COLUMNS: Columns = {
    "method": lambda row: row["method"],
    "roles": lambda row: row["roles"],
    "seeds": lambda row: str(row["seeds"]),
    "heads": lambda row: row["heads"],
    "grey": lambda row: number(row["grey"], "{:.0%}"),
    "budget": lambda row: f"{row['budget']:,}",
    "right": lambda row: f"{row['correct']:,}/{row['n']:,}",
    "95%\ninterval": lambda row: "{:.2f}-{:.2f}".format(*row["interval"]),
    RECALL: lambda row: number(row["recall"], "{:.3f}"),
}
"""One row of `_pooled` as text."""


def head_table(results: Mapping[str, Any]) -> Table:
    """Right answers and recall by method, kind of roles and budget, all seeds together."""
    dense = results["dense"]
    title = (
        f"heads that retrieve: {about(results)}, {results['target_heads']} heads wanted, {results['seeds']} seed(s), "
        f"{asked(results, dense['n'], dense['correct']).replace('questions', 'questions each')}"
    )
    table = new_table(title, COLUMNS, ("method", "roles"), _notes(results))
    return fill(table, _pooled(results), COLUMNS, "method", "roles", bold="chosen")


def _notes(results: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    method, roles = _written_down(results)
    heads = next(row["heads"] for row in results["rows"] if row["list"] == results["chosen"])
    notes = [f"role file and recipe: {method}, seed {results['found'][0]['seed']}, {roles}: {heads} heads"]
    if results["seeds"] > 1:
        notes.append("intervals: Wilson, of all seeds' answers together, though seeds are asked the same questions")
    if _grey(results):
        notes.append("grey: gates that have not decided, between 0.1 and 0.9 at the end of training, mean over seeds")
    return notes


def head_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Draw into the results folder; returns the picture's path.

    From the logs below `folder` gates over the training and its curves; and what roles achieve.
    """
    runs = _trainings(results, folder)
    first = [own[0] for own in grouped(runs, lambda run: str(run["method"])).values()]
    count = numpy.size(first[0]["records"][0]["mean"]) if first else 0
    heights = [*((min(max(0.045 * count, 2.4), 6.5) + 0.5, 2.7) if first else ()), 3.0]
    with canvas(11.0, sum(heights)) as figure:
        figure.set_dpi(_SHARP)
        rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        if first:
            _polarisation(figure, rows[0].subgridspec(1, len(first)).subplots(squeeze=False)[0], first)
            _training(rows[1].subgridspec(1, 3).subplots(squeeze=False)[0], runs)
        _answers(figure.add_subplot(rows[-1]), results)
        replace_text(folder / PICTURE, as_svg(figure))
    return folder / PICTURE


def _polarisation(figure: Figure, panels: Sequence[Axes], runs: Sequence[Row]) -> None:
    """A heat map per method, heads in layer-major order against steps, of its first seed."""
    for axes, run in zip(panels, runs, strict=True):
        means = numpy.array([record["mean"] for record in run["records"]])
        layers, heads = means.shape[1:]
        steps = numpy.array([record["step"] for record in run["records"]], dtype=float)
        edges = numpy.concatenate([steps[:1], (steps[1:] + steps[:-1]) / 2, steps[-1:]])
        lines, colors = numpy.arange(layers * heads + 1), means.reshape(len(steps), -1).T
        image = axes.pcolormesh(edges, lines, colors, cmap="RdBu_r", vmin=0, vmax=1, rasterized=True)
        axes.grid(visible=False)
        axes.set_title(f"{run['method']}: {KINDS[run['method']].mean_name} of every head, seed {run['seed']}")
        axes.set_xlabel("step")
        named = range(0, layers, -(-layers // _LABELS))
        axes.set_yticks([heads * (layer + 0.5) for layer in named], [str(run["layers"][layer]) for layer in named])
        axes.yaxis.set_minor_locator(FixedLocator([heads * layer for layer in range(layers + 1)]))
        axes.tick_params(axis="y", which="major", length=0)
        axes.set_ylim(layers * heads, 0)
    panels[0].set_ylabel("heads by layer\n(red: reads everything)")
    figure.colorbar(image, ax=panels, aspect=30, pad=0.01)


def _training(panels: Sequence[Axes], runs: Sequence[Row]) -> None:
    """Loss, expected number of heads and multiplier over steps; methods by colour, a thin line per seed."""
    methods = grouped(runs, lambda run: str(run["method"]))
    drawn = marks(methods)
    for method, run in ((method, run) for method, own in methods.items() for run in own):
        label = method if run is methods[method][0] else None
        for axes, name in zip(panels, ("loss", "expected_l0", "multiplier"), strict=True):
            # The first record has no loss, and a logarithmic axis no zero.
            known = [one for one in run["records"] if one[name] is not None and (one[name] or name != "loss")]
            steps, values = [one["step"] for one in known], [one[name] for one in known]
            axes.plot(steps, values, color=drawn[method].color, linewidth=0.9, alpha=0.8, label=label)
    target = runs[0]["target"]
    panels[0].set_yscale("log")
    panels[1].axhline(target, color=INK, linestyle="dashed", linewidth=1)
    panels[1].set_ylim(bottom=0)
    titles = ("distillation loss", "expected heads that read everything", "multiplier of the constraint")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, xlabel="step")
    panels[1].legend(panels[1].lines[-1:], [f"wanted: {target}"], fontsize=8)
    panels[2].legend(fontsize=8)


def _answers(axes: Axes, results: Mapping[str, Any]) -> None:
    """Share of right answers by budget with Wilson's intervals, groups side by side."""
    groups = grouped(_pooled(results), lambda row: f"{row['method']}, {row['roles']}")
    budgets = list(dict.fromkeys(row["budget"] for row in results["rows"]))
    drawn = marks(groups)
    axes.axhline(results["dense"]["accuracy"], color=MUTED, linestyle="dashed", linewidth=1, label="dense")
    for place, (label, rows) in enumerate(groups.items()):
        x = [budget + side_by_side(place, len(groups)) for budget in range(len(budgets))]
        y, ends = [row["correct"] / row["n"] for row in rows], [row["interval"] for row in rows]
        style = {"markersize": 5, "linewidth": 1, "capsize": 2, "label": f"{label} ({rows[0]['heads']} heads)"}
        with_intervals(axes, x, y, ends, drawn[label], **style)
    number_places(axes, budgets)
    limits = {"xlim": (-0.6, len(budgets) - 0.4), "ylim": (-0.03, 1.03)}
    axes.set(xlabel="budget", title=f"answers right, {results['seeds']} seed(s)", **limits)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _trainings(results: Mapping[str, Any], folder: Path) -> list[Row]:
    """Trainings with the `records` of their logs; `layers` are those of the gates, as the model counts them."""
    trained: list[Row] = []
    for found in results["found"]:
        if found["grey"] is not None:
            log = folder / "training" / f"{found['method']}-{found['seed']}" / "steps.jsonl"
            head, *records = read_lines(log)  # the settings come first
            layers = full_layers(results.get("environment", {}), 1 + len(records[0]["mean"]))[1:]
            target = head["settings"]["training.target"]
            trained.append({**found, "target": target, "layers": layers, "records": records})
    return trained


def _pooled(results: Mapping[str, Any]) -> list[Row]:
    """Rows by method, kind of roles and budget, in order of appearance, all seeds together."""
    grey, chosen = _grey(results), _written_down(results)
    pooled: list[Row] = []
    for (method, roles), own in grouped(results["rows"], lambda row: (row["method"], row["roles"])).items():
        fewest, most = min(row["heads"] for row in own), max(row["heads"] for row in own)
        of_all = {
            "method": method,
            "roles": roles,
            "chosen": (method, roles) == chosen,
            "seeds": len({row["seed"] for row in own}),
            "heads": str(most) if fewest == most else f"{fewest} to {most}",
            "grey": grey.get(method),
        }
        for budget, rows in grouped(own, lambda row: int(row["budget"])).items():
            right, count = (sum(row[name] for row in rows) for name in ("correct", "n"))
            answers = {"correct": right, "n": count, "interval": wilson(right, count), "recall": mean_recall(rows)}
            pooled.append({**of_all, "budget": budget, **answers})
    return pooled


def _grey(results: Mapping[str, Any]) -> dict[str, float]:
    """Share of undecided gates by trained method, mean over seeds."""
    trained = grouped((one for one in results["found"] if one["grey"] is not None), lambda one: str(one["method"]))
    return {method: fmean(one["grey"] for one in ones) for method, ones in trained.items()}


def _written_down(results: Mapping[str, Any]) -> tuple[str, str]:
    """Method and kind of the roles that went into the recipe."""
    first = results["found"][0]
    kind = "exact" if results["exact"] or "threshold" not in first["roles"] else "threshold"
    return first["method"], kind
