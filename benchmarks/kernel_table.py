"""The table that `python -m benchmarks kernels` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from saccade.bench.table import ratio, table_of, with_sections

KERNEL_COLUMNS = (
    "context",
    "batch",
    "threads",
    "operation",
    "implementation",
    "µs",
    "quartiles",
    "MB",
    "GB/s",
    "of bandwidth",
    "over dense",
)


def kernel_table(results: Mapping[str, Any]) -> Table:
    """Rows of single operations, one section per context, batch and number of threads."""
    table = table_of(results, KERNEL_COLUMNS)
    for row in with_sections(table, results["rows"]):
        table.add_row(
            f"{row['context']:,}",
            str(row["batch"]),
            str(row["threads"]),
            row["operation"],
            row["implementation"],
            f"{row['us']:,.0f}",
            f"{row['us_fast']:,.0f} to {row['us_slow']:,.0f}",
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['gb_s']:.1f}",
            f"{row['share_of_bandwidth']:.0%}",
            ratio(row["over_dense"]),
        )
    return table
