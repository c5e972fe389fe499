"""Long answers as a table: a row per arm."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.table import Table

from saccade.report.table import new_table

MEANS = {"tokens": "{:,.0f}", "ended": "{:.3f}", "right": "{:.3f}"}


def reasoning_table(results: Mapping[str, Any]) -> Table:
    """Means over the problems that dense attention answers rightly and at length."""
    told = f"{results['qualified']} of {results['asked']} problems qualify; {results['environment']['model']}"
    table, rows = new_table(told, ("policy", "problems", *MEANS), words=("policy",)), results["rows"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        means = (form.format(fmean(fmean(one[name]) for one in own)) for name, form in MEANS.items())
        table.add_row(arm, str(len(own)), *means)
    return table
