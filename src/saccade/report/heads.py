"""Table and picture of `saccade calibrate heads`."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from ..calibrate.training import TRACED
from .drawing import as_svg, canvas, side_by_side, with_intervals
from .palette import INK, MUTED, marks
from .table import fill, new_table
from .wording import RECALL, Columns, grouped, number

PICTURE = "heads.svg"

COLUMNS: Columns = {
    "method": lambda row: row["method"],
    "roles": lambda row: row["roles"],
    "heads": lambda row: str(row["heads"]),
    "budget": lambda row: f"{row['budget']:,}",
    "right": lambda row: f"{row['correct']:,}/{row['n']:,}",
    "95%\ninterval": lambda row: "{:.2f}-{:.2f}".format(*row["interval"]),
    RECALL: lambda row: number(row["recall"], "{:.3f}"),
}
"""One row of the results as text."""


def head_table(results: Mapping[str, Any]) -> Table:
    """Right answers and recall by method, kind of roles and budget."""
    dense, of = results["dense"], results["chosen_of"]
    title = (
        f"heads that retrieve: model {results['model']}, task {results['task']}, context {results['context']:,}, "
        f"{results['target_heads']} heads wanted, {dense['n']:,} questions in {results['texts']:,} texts; dense "
        f"attention {dense['correct']:,}/{dense['n']:,}"
    )
    rows = [{**row, "chosen": (row["method"], row["roles"]) == (of["method"], of["roles"])} for row in results["rows"]]
    heads = next(row["heads"] for row in rows if row["chosen"])
    notes = [f"role file and recipe: {of['method']}, {of['roles']}: {heads} heads"]
    return fill(new_table(title, COLUMNS, ("method", "roles"), notes), rows, COLUMNS, "method", "roles", bold="chosen")


def head_picture(results: Mapping[str, Any]) -> str:
    """The training and what roles achieve, as SVG."""
    traces = [one["trace"] for one in results["found"] if one["trace"]]
    heights = [*(2.7 for _ in traces), 3.0]
    with canvas(11.0, sum(heights)) as figure:
        rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        for trace in traces:
            wanted = results["target_heads"] - results["environment"]["kv_heads"]
            _training(rows[0].subgridspec(1, len(TRACED) - 1).subplots(squeeze=False)[0], trace, wanted)
        _answers(figure.add_subplot(rows[-1]), results)
        return as_svg(figure)


def _training(panels: Sequence[Axes], trace: Mapping[str, Any], wanted: int) -> None:
    """Loss, expected number of heads above the first layer and multiplier over steps."""
    titles = ("distillation loss", "expected heads that read everything", "multiplier of the constraint")
    for axes, name, title in zip(panels, TRACED[1:], titles, strict=True):
        # The first record has no loss, and a logarithmic axis no zero.
        known = [(step, one) for step, one in zip(trace["step"], trace[name], strict=True) if one or name != "loss"]
        axes.plot(*zip(*known, strict=True), linewidth=0.9)
        axes.set(title=title, xlabel="step")
    panels[0].set_yscale("log")
    line = panels[1].axhline(wanted, color=INK, linestyle="dashed", linewidth=1)
    panels[1].set_ylim(bottom=0)
    panels[1].legend([line], [f"wanted: {wanted}"], fontsize=8)


def _answers(axes: Axes, results: Mapping[str, Any]) -> None:
    """Share of right answers by budget with Wilson's intervals, groups side by side."""
    groups = grouped(results["rows"], lambda row: f"{row['method']}, {row['roles']}")
    budgets = list(dict.fromkeys(row["budget"] for row in results["rows"]))
    drawn = marks(groups)
    axes.axhline(results["dense"]["accuracy"], color=MUTED, linestyle="dashed", linewidth=1, label="dense")
    for place, (label, rows) in enumerate(groups.items()):
        x = [budget + side_by_side(place, len(groups)) for budget in range(len(budgets))]
        y, ends = [row["accuracy"] for row in rows], [row["interval"] for row in rows]
        style = {"markersize": 5, "linewidth": 1, "capsize": 2, "label": f"{label} ({rows[0]['heads']} heads)"}
        with_intervals(axes, x, y, ends, drawn[label], **style)
    axes.set_xticks(range(len(budgets)), [f"{budget:,}" for budget in budgets])
    axes.set(xlabel="budget", title="answers right", xlim=(-0.6, len(budgets) - 0.4), ylim=(-0.03, 1.03))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
