"""Long answers as a table: a row per arm."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.table import Table

from saccade.report.table import new_table


def reasoning_table(results: Mapping[str, Any]) -> Table:
    """Means over problems, of which those that dense attention answers are named in the title."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for row in results["rows"]:
        arms.setdefault(row["arm"], []).append(row)
    asked = f"{results['qualified']} of {results['asked']} problems qualify" if arms else "no problems yet"
    title = f"{asked}; {results['environment']['model']}, {results['environment']['device']}"
    table = new_table(title, ("policy", "problems", "tokens", "ended", "right", "repeated"), words=("policy",))
    for arm, rows in arms.items():
        tokens, ended, right, again = (
            fmean(fmean(row[what]) for row in rows) for what in ("tokens", "ended", "right", "repeated")
        )
        table.add_row(arm, str(len(rows)), f"{tokens:,.0f}", f"{ended:.3f}", f"{right:.3f}", f"{again:.3f}")
    return table
