"""Table and picture of `saccade calibrate heads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from ..calibrate.training import TRACED
from ..eval.interval import wilson
from ..files import replace_text
from .drawing import as_svg, canvas, number_places, side_by_side, with_intervals
from .palette import INK, MUTED, marks
from .table import fill, new_table
from .wording import RECALL, Columns, Row, about, asked, grouped, mean_recall, number

PICTURE = "heads.svg"

COLUMNS: Columns = {
    "method": lambda row: row["method"],
    "roles": lambda row: row["roles"],
    "seeds": lambda row: str(row["seeds"]),
    "heads": lambda row: row["heads"],
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
    of = results["chosen_of"]
    heads = next(row["heads"] for row in results["rows"] if row["list"] == results["chosen"])
    notes = [f"role file and recipe: {of['method']}, seed {of['seed']}, {of['roles']}: {heads} heads"]
    if results["seeds"] > 1:
        notes.append("intervals: Wilson, of all seeds' answers together, though seeds are asked the same questions")
    return notes


def head_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Draw trainings and what roles achieve into the results folder; returns the picture's path."""
    runs = [one for one in results["found"] if one["trace"]]
    heights = [*([2.7] if runs else ()), 3.0]
    with canvas(11.0, sum(heights)) as figure:
        rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        if runs:
            wanted = results["target_heads"] - results["environment"]["kv_heads"]
            _training(rows[0].subgridspec(1, len(TRACED) - 1).subplots(squeeze=False)[0], runs, wanted)
        _answers(figure.add_subplot(rows[-1]), results)
        replace_text(folder / PICTURE, as_svg(figure))
    return folder / PICTURE


def _training(panels: Sequence[Axes], runs: Sequence[Row], wanted: int) -> None:
    """Loss, expected number of heads above the first layer and multiplier over steps, a line per seed."""
    drawn = marks(str(run["seed"]) for run in runs)
    titles = ("distillation loss", "expected heads that read everything", "multiplier of the constraint")
    for axes, name, title in zip(panels, TRACED[1:], titles, strict=True):
        for run in runs:
            # The first record has no loss, and a logarithmic axis no zero.
            trace = run["trace"]
            known = [(step, one) for step, one in zip(trace["step"], trace[name], strict=True) if one or name != "loss"]
            color, label = drawn[str(run["seed"])].color, f"seed {run['seed']}"
            axes.plot(*zip(*known, strict=True), color=color, linewidth=0.9, alpha=0.8, label=label)
        axes.set(title=title, xlabel="step")
    panels[0].set_yscale("log")
    line = panels[1].axhline(wanted, color=INK, linestyle="dashed", linewidth=1)
    panels[1].set_ylim(bottom=0)
    panels[1].legend([line], [f"wanted: {wanted}"], fontsize=8)
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


def _pooled(results: Mapping[str, Any]) -> list[Row]:
    """Rows by method, kind of roles and budget, in order of appearance, all seeds together."""
    of = results["chosen_of"]
    pooled: list[Row] = []
    for (method, roles), own in grouped(results["rows"], lambda row: (row["method"], row["roles"])).items():
        fewest, most = min(row["heads"] for row in own), max(row["heads"] for row in own)
        of_all = {
            "method": method,
            "roles": roles,
            "chosen": (method, roles) == (of["method"], of["roles"]),
            "seeds": len({row["seed"] for row in own}),
            "heads": str(most) if fewest == most else f"{fewest} to {most}",
        }
        for budget, rows in grouped(own, lambda row: int(row["budget"])).items():
            right, count = (sum(row[name] for row in rows) for name in ("correct", "n"))
            answers = {"correct": right, "n": count, "interval": wilson(right, count), "recall": mean_recall(rows)}
            pooled.append({**of_all, "budget": budget, **answers})
    return pooled
