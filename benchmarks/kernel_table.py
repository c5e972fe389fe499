"""The table that `python -m benchmarks kernels` prints."""

from functools import partial

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

kernel_table = partial(timing_table, columns=KERNEL_COLUMNS)
"""A section per context, batch and number of threads."""
