"""Table and lines of the trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from saccade.calibrate.training import LOSS
from saccade.report.table import new_table

Results = Mapping[str, Any]


def trial_table(results: Results) -> Table:
    """Where every training has ended, or has come to."""
    title = f"gates of {results['model']}, {results['target']} wanted open beside the first layer's heads"
    columns = ("variant", "seed", "step", "E‖z‖₀", "open", "grey", "multiplier")
    notes = ["open: E[z] above 0.5; grey: share between 0.1 and 0.9; multiplier: per unit of the loss"]
    table = new_table(title, columns, columns[:1], notes)
    for run in results["runs"]:
        cells = (
            run["variant"],
            str(run["seed"]),
            f"{run['step']:,}",
            f"{run['expected_l0']:.1f}",
            str(run["open"]),
            f"{run['grey']:.0%}",
            f"{per_loss(run)[-1]:.4g}",
        )
        table.add_row(*map(Text, cells))
    return table


def progress_line(results: Results) -> str:
    """How far all trainings have come."""
    steps = (f"{run['variant']}-{run['seed']} {run['step']}" for run in results["runs"])
    return f"of {results['steps']:,} steps: {', '.join(steps)}"


def per_loss(run: Results) -> list[float]:
    """The multiplier as it would be if the loss were not divided."""
    size = run["start"] if run["scale"] == LOSS and run["start"] else 1.0
    return [value * size for value in run["trace"]["multiplier"]]
