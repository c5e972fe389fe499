"""The table that `python -m benchmarks kernels` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from saccade.report.timings import SETTING, timing_table
from saccade.report.wording import Columns, number

KERNEL_COLUMNS: Columns = {
    **SETTING,
    "operation": lambda row: row["operation"],
    "implementation": lambda row: row["implementation"],
    "µs": lambda row: f"{row['us']:,.0f}",
    "quartiles": lambda row: f"{row['us_fast']:,.0f} to {row['us_slow']:,.0f}",
    "MB": lambda row: f"{row['bytes'] / 1e6:,.1f}",
    "GB/s": lambda row: f"{row['gb_s']:.1f}",
    "of bandwidth": lambda row: f"{row['share_of_bandwidth']:.0%}",
    "over dense": lambda row: number(row["over_dense"], "{:.2f}×"),
}


def kernel_table(results: Mapping[str, Any]) -> Table:
    """Rows of single operations, one section per context, batch and number of threads."""
    return timing_table(results, KERNEL_COLUMNS)
