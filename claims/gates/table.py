"""Table and lines of the trial."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from saccade.calibrate.gates import Gates
from saccade.report.table import fill, new_table
from saccade.report.wording import Columns, grouped

from .scaled import DIVIDED

Results = Mapping[str, Any]


def trial_table(results: Results) -> Table:
    """Where every training has ended, or has come to."""
    title = f"gates of {results['model']}, {results['target']} wanted open beside the first layer's heads"
    columns: Columns = {
        "variant": lambda run: run["variant"],
        "seed": lambda run: str(run["seed"]),
        "step": lambda run: f"{run['step']:,}",
        "E‖z‖₀": lambda run: f"{run['expected_l0']:.1f}",
        "open": lambda run: str(run["open"]),
        "grey": lambda run: f"{run['grey']:.0%}",
        "multiplier": lambda run: f"{per_loss(run)[-1]:.4g}",
    }
    notes = ["open: E[z] above 0.5; grey: share between 0.1 and 0.9; multiplier: per unit of the loss"]
    return fill(new_table(title, columns, ("variant",), notes), results["runs"], columns)


def progress_line(results: Results) -> str:
    """How far all trainings have come."""
    steps = (f"{run['variant']}-{run['seed']} {run['step']}" for run in results["runs"])
    return f"of {results['steps']:,} steps: {', '.join(steps)}"


def per_loss(run: Results) -> list[float]:
    """The multiplier as it would be if the loss were not divided."""
    divided = run["scale"] in DIVIDED and run["kind"] != Gates.kind  # whose first loss is none
    size = run["start"] if divided and run["start"] else 1.0
    return [value * size for value in run["trace"]["multiplier"]]


def answer_table(results: Results) -> Table:
    """Right answers by variant, roles and budget, of all seeds."""
    answers = results["answers"]
    dense = fmean(answers["dense"])
    title = (
        f"right answers of {results['model']}, {len(answers['dense'])} texts × {answers['asked']}, dense {dense:.3f}"
    )
    table = new_table(title, ("variant", "roles", "heads", "budget", "right"), ("variant", "roles"))
    for (variant, roles, budget), rows in grouped(answers["rows"], _told).items():
        heads = sorted({row["heads"] for row in rows})
        right = fmean(value for row in rows for value in row["right"])
        counts = str(heads[0]) if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
        table.add_row(*map(Text, (variant, roles, counts, str(budget), f"{right:.3f}")))
    return table


def _told(row: Results) -> tuple[str, str, int]:
    return row["variant"], row["roles"], row["budget"]
