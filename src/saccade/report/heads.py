"""Table and picture of `saccade calibrate heads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from .drawing import as_svg, canvas, side_by_side, with_intervals, write_picture
from .labels import full_layers
from .palette import INK, MUTED, marks
from .table import new_table
from .wording import RECALL, Row, about, asked, grouped, mean_recall, number

PICTURE = "heads.svg"

_SHARP = 200  # dots per inch of the heat maps, which would be too many paths
_LABELS = 12


@dataclass(frozen=True, slots=True)
class _Run:
    """What one training has recorded; `layers` are those of its gates, as the model counts them."""

    method: str
    seed: int
    target: int
    layers: list[int]
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Group:
    """Roles of one method and kind, over all its seeds."""

    method: str
    roles: str
    rows: list[Row]

    @property
    def label(self) -> str:
        return f"{self.method}, {self.roles}"

    @property
    def heads(self) -> str:
        counts = [row["heads"] for row in self.rows]
        return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"

    def at(self, budget: int) -> tuple[int, int, float | None]:
        """Right answers, questions and mean recall of all seeds, over heads with a set."""
        own = [row for row in self.rows if row["budget"] == budget]
        right, count = (sum(row[name] for row in own) for name in ("correct", "n"))
        return right, count, mean_recall(own)


def head_table(results: Mapping[str, Any]) -> Table:
    """Right answers and recall by method, kind of roles and budget, all seeds together."""
    dense, grey, chosen = results["dense"], _grey(results), _written_down(results)
    title = (
        f"heads that retrieve: {about(results)}, {results['target_heads']} heads wanted, {results['seeds']} seed(s), "
        f"{asked(results, dense['n'], dense['correct']).replace('questions', 'questions each')}"
    )
    columns = ("method", "roles", "seeds", "heads", "grey", "budget", "right", "95%\ninterval", RECALL)
    table = new_table(title, columns, columns[:2], _notes(results))
    for group in _groups(results):
        table.add_section()
        seeds = len({row["seed"] for row in group.rows})
        of_all = (group.method, group.roles, str(seeds), group.heads, number(grey.get(group.method), "{:.0%}"))
        for budget in _budgets(results):
            right, count, recall = group.at(budget)
            low, high = wilson(right, count)
            own = (f"{budget:,}", f"{right:,}/{count:,}", f"{low:.2f}-{high:.2f}", number(recall, "{:.3f}"))
            table.add_row(*of_all, *own, style="bold" if (group.method, group.roles) == chosen else None)
    return table


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
    here = results.get("environment", {})
    runs = [_read(folder, found, here) for found in results["found"] if found["grey"] is not None]
    first = list({run.method: run for run in reversed(runs)}.values())[::-1]
    count = numpy.size(first[0].records[0]["mean"]) if first else 0
    heights = [*((min(max(0.045 * count, 2.4), 6.5) + 0.5, 2.7) if first else ()), 3.0]
    with canvas(11.0, sum(heights)) as figure:
        figure.set_dpi(_SHARP)
        rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        if first:
            _polarisation(figure, rows[0].subgridspec(1, len(first)).subplots(squeeze=False)[0], first)
            _training(rows[1].subgridspec(1, 3).subplots(squeeze=False)[0], runs)
        _answers(figure.add_subplot(rows[-1]), results)
        return write_picture(folder / PICTURE, as_svg(figure))


def _polarisation(figure: Figure, panels: Sequence[Axes], runs: Sequence[_Run]) -> None:
    """A heat map per method, heads in layer-major order against steps, of its first seed."""
    for axes, run in zip(panels, runs, strict=True):
        means = numpy.array([record["mean"] for record in run.records])
        layers, heads = means.shape[1:]
        steps = numpy.array([record["step"] for record in run.records], dtype=float)
        edges = numpy.concatenate([steps[:1], (steps[1:] + steps[:-1]) / 2, steps[-1:]])
        lines, colors = numpy.arange(layers * heads + 1), means.reshape(len(steps), -1).T
        image = axes.pcolormesh(edges, lines, colors, cmap="RdBu_r", vmin=0, vmax=1, rasterized=True)
        axes.grid(visible=False)
        axes.set_title(f"{run.method}: {KINDS[run.method].mean_name} of every head, seed {run.seed}")
        axes.set_xlabel("step")
        named = range(0, layers, -(-layers // _LABELS))
        axes.set_yticks([heads * (layer + 0.5) for layer in named], [str(run.layers[layer]) for layer in named])
        axes.yaxis.set_minor_locator(FixedLocator([heads * layer for layer in range(layers + 1)]))
        axes.tick_params(axis="y", which="major", length=0)
        axes.set_ylim(layers * heads, 0)
    panels[0].set_ylabel("heads by layer\n(red: reads everything)")
    figure.colorbar(image, ax=panels, aspect=30, pad=0.01)


def _training(panels: Sequence[Axes], runs: Sequence[_Run]) -> None:
    """Loss, expected number of heads and multiplier over steps; methods by colour, a thin line per seed."""
    drawn = marks(run.method for run in runs)
    first = {run.method: run for run in reversed(runs)}
    for run in runs:
        label = run.method if run is first[run.method] else None
        for axes, name in zip(panels, ("loss", "expected_l0", "multiplier"), strict=True):
            # The first record has no loss, and a logarithmic axis no zero.
            points = [(r["step"], r[name]) for r in run.records if r[name] is not None and (r[name] or name != "loss")]
            axes.plot(*zip(*points, strict=True), color=drawn[run.method].color, linewidth=0.9, alpha=0.8, label=label)
    target = runs[0].target
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
    budgets, groups, dense = _budgets(results), _groups(results), results["dense"]
    drawn = marks(group.label for group in groups)
    axes.axhline(dense["accuracy"], color=MUTED, linestyle="dashed", linewidth=1, label="dense")
    for place, group in enumerate(groups):
        counted = [group.at(budget)[:2] for budget in budgets]
        x = [budget + side_by_side(place, len(groups)) for budget in range(len(budgets))]
        y, ends = [right / count for right, count in counted], [wilson(*both) for both in counted]
        style = {"markersize": 5, "linewidth": 1, "capsize": 2, "label": f"{group.label} ({group.heads} heads)"}
        with_intervals(axes, x, y, ends, drawn[group.label], **style)
    axes.set_xticks(range(len(budgets)), [f"{budget:,}" for budget in budgets])
    limits = {"xlim": (-0.6, len(budgets) - 0.4), "ylim": (-0.03, 1.03)}
    axes.set(xlabel="budget", title=f"answers right, {results['seeds']} seed(s)", **limits)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _read(folder: Path, found: Mapping[str, Any], environment: Mapping[str, Any]) -> _Run:
    """The log of one training; its first line holds the settings."""
    head, *records = read_lines(folder / "training" / f"{found['method']}-{found['seed']}" / "steps.jsonl")
    layers = full_layers(environment, 1 + len(records[0]["mean"]))[1:]
    return _Run(found["method"], found["seed"], head["settings"]["training.target"], layers, records)


def _groups(results: Mapping[str, Any]) -> list[_Group]:
    """Rows by method and kind of roles, in order of appearance."""
    found = grouped(results["rows"], lambda row: (row["method"], row["roles"]))
    return [_Group(method, roles, rows) for (method, roles), rows in found.items()]


def _budgets(results: Mapping[str, Any]) -> list[int]:
    return list(dict.fromkeys(row["budget"] for row in results["rows"]))


def _grey(results: Mapping[str, Any]) -> dict[str, float]:
    """Share of undecided gates by trained method, mean over seeds."""
    trained = grouped((one for one in results["found"] if one["grey"] is not None), lambda one: str(one["method"]))
    return {method: fmean(one["grey"] for one in ones) for method, ones in trained.items()}


def _written_down(results: Mapping[str, Any]) -> tuple[str, str]:
    """Method and kind of the roles that went into the recipe."""
    first = results["found"][0]
    kind = "exact" if results["exact"] or "threshold" not in first["roles"] else "threshold"
    return first["method"], kind
