"""The tables that `saccade bench decode` and `saccade bench serve` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

COLUMNS = (
    "context",
    "batch",
    "threads",
    "policy",
    "runtime",
    "ms",
    "select",
    "attend",
    "index",
    "rectify",
    "other",
    "MB",
    "ideal",
    "of ceiling",
    "over dense",
)


SERVING_COLUMNS = (
    "context",
    "batch",
    "policy",
    "ms per token",
    "quartiles",
    "bytes",
    "ideal ms",
    "share of ceiling",
    "over stock",
)


def decode_table(results: Mapping[str, Any]) -> Table:
    """Rows of a benchmark, one section per context, batch and number of threads."""
    table = table_of(results, COLUMNS)
    for row in with_sections(table, results["rows"]):
        table.add_row(
            f"{row['context']:,}",
            str(row["batch"]),
            str(row["threads"]),
            row["policy"],
            row["runtime"],
            f"{row['ms_per_token']:.1f}",
            *(_milliseconds(row[f"ms_{part}"]) for part in ("selection", "attention", "index", "rectify", "other")),
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['ideal_ms']:.1f}",
            f"{row['share_of_ceiling']:.0%}",
            ratio(row["speedup_over_best_dense"]),
        )
    return table


def serving_table(results: Mapping[str, Any]) -> Table:
    """Rows of a benchmark of vLLM, one section per context and batch."""
    table = table_of(results, SERVING_COLUMNS)
    for row in with_sections(table, results["rows"]):
        table.add_row(
            f"{row['context']:,}",
            str(row["batch"]),
            row["policy"],
            f"{row['ms_per_token']:.1f}",
            f"{row['ms_fast']:.1f} to {row['ms_slow']:.1f}",
            f"{row['bytes'] / 1e9:.2f} GB",
            f"{row['ideal_ms']:.1f}",
            f"{row['share_of_ceiling']:.0%}",
            ratio(row["speedup_over_stock"]),
        )
    return table


def table_of(results: Mapping[str, Any], columns: tuple[str, ...]) -> Table:
    here = results["environment"]
    title = (
        f"{results['shape']}, {here['dtype']}, {here['processor']}, "
        f"read bandwidth {here['read_bandwidth_gb_s']} GB/s at {here['threads']} threads"
    )
    return Table(*columns, title=title, box=box.SIMPLE_HEAD, title_justify="left")


def with_sections(table: Table, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows, with a line in the table wherever the setting changes."""
    previous = None
    for row in rows:
        setting = (row["context"], row["batch"], row["threads"])
        if previous not in (None, setting):
            table.add_section()
        previous = setting
        yield row


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
