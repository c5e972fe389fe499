"""The tables that `saccade bench decode` and `saccade bench serve` print."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from rich.table import Table

from .labels import labels, meanings
from .table import fill, new_table
from .wording import Columns, number

SETTING: Columns = {
    "context": lambda row: f"{row['context']:,}",
    "batch": lambda row: str(row["batch"]),
    "threads": lambda row: str(row["threads"]),
}
COLUMNS: Columns = {
    **SETTING,
    "policy": lambda row: row["policy"],
    "runtime": lambda row: row["runtime"],
    "ms": lambda row: f"{row['ms_per_token']:.1f}",
    "select": lambda row: number(row["ms_selection"], "{:.1f}"),
    "attend": lambda row: number(row["ms_attention"], "{:.1f}"),
    "index": lambda row: number(row["ms_index"], "{:.1f}"),
    "rectify": lambda row: number(row["ms_rectify"], "{:.1f}"),
    "other": lambda row: number(row["ms_other"], "{:.1f}"),
    "MB": lambda row: f"{row['bytes'] / 1e6:,.0f}",
    "ideal": lambda row: f"{row['ideal_ms']:.1f}",
    "of ceiling": lambda row: f"{row['share_of_ceiling']:.0%}",
    "over dense": lambda row: number(row["speedup_over_best_dense"], "{:.2f}×"),
}
SERVING_COLUMNS: Columns = {
    "context": SETTING["context"],
    "batch": SETTING["batch"],
    "policy": lambda row: row["policy"],
    "ms per token": lambda row: f"{row['ms_per_token']:.2f}",
    "whole loop": lambda row: number(row.get("ms_loop"), "{:.2f}"),
    "tokens per cycle": lambda row: number(row.get("tokens_per_cycle"), "{:.2f}"),
    "ms per cycle": lambda row: f"{row['ms_per_token'] * (row.get('tokens_per_cycle') or 1):.2f}",
    "quartiles": lambda row: f"{row['ms_fast']:.2f} to {row['ms_slow']:.2f}",
    "bytes": lambda row: f"{row['bytes'] / 1e9:.2f} GB",
    "ideal ms": lambda row: f"{row['ideal_ms']:.2f}",
    "share of ceiling": lambda row: f"{row['share_of_ceiling']:.0%}",
    "over stock": lambda row: number(row["speedup_over_stock"], "{:.2f}×"),
    "stock's drift": lambda row: number(row["drift"], "{:+.1%}") + (" void" if row["void"] else ""),
}


def timing_table(results: Mapping[str, Any], columns: Columns, setting: Iterable[str] = SETTING) -> Table:
    """Rows of a benchmark, one section per value of what `setting` names."""
    here = results["environment"]
    bandwidth = f"read bandwidth {here['read_bandwidth_gb_s']} GB/s at {here['threads']} threads"
    if "copy_bandwidth_gb_s" in here:
        bandwidth = f"copy bandwidth {here['copy_bandwidth_gb_s']} GB/s"
    where = here["processor"] if here["device"] == "cpu" else here["device"]
    cache = results.get("settings", {}).get("kv_cache_dtype", "auto")
    dtype = here["dtype"] if cache == "auto" else f"{here['dtype']} on a cache in {cache}"
    title = f"{results['shape']}, {dtype}, {where}, {bandwidth}"
    rows, notes = results["rows"], list[str]()
    if "policy" in columns:
        found = labels(row["policy"] for row in rows)
        rows, notes = [{**row, "policy": found[row["policy"]]} for row in rows], meanings(found)
    table = new_table(title, columns, ("policy", "runtime", "operation", "implementation"), notes)
    return fill(table, rows, columns, *(key for key in setting if all(key in row for row in rows)))


decode_table, serving_table = (partial(timing_table, columns=columns) for columns in (COLUMNS, SERVING_COLUMNS))
