"""The table that `saccade bench decode` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

COLUMNS = (
    "context",
    "batch",
    "threads",
    "policy",
    "ms per token",
    "quartiles",
    "cache read",
    "over stock",
    "over dense",
)


def decode_table(results: Mapping[str, Any]) -> Table:
    """Rows of a benchmark, one section per context, batch and number of threads."""
    here = results["environment"]
    title = (
        f"{results['shape']}, {here['dtype']}, {here['processor']}, "
        f"read bandwidth {here['read_bandwidth_gb_s']} GB/s at {here['threads']} threads"
    )
    table = Table(*COLUMNS, title=title, box=box.SIMPLE_HEAD, title_justify="left")
    previous = None
    for row in results["rows"]:
        setting = (row["context"], row["batch"], row["threads"])
        if previous not in (None, setting):
            table.add_section()
        previous = setting
        table.add_row(
            f"{row['context']:,}",
            str(row["batch"]),
            str(row["threads"]),
            row["policy"],
            f"{row['ms_per_token']:.1f}",
            f"{row['ms_fast']:.1f} to {row['ms_slow']:.1f}",
            f"{row['share_attended']:.1%}",
            _ratio(row["speedup_over_stock"]),
            _ratio(row["speedup_over_dense"]),
        )
    return table


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"
