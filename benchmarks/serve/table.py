"""The table that `python -m benchmarks serve` prints."""

from __future__ import annotations

from functools import partial

from saccade.report.timings import SERVING_COLUMNS, timing_table
from saccade.report.wording import Columns, number

COLUMNS: Columns = {
    "clients": lambda row: str(row["clients"]),
    "policy": SERVING_COLUMNS["policy"],
    "requests/s": lambda row: f"{row['requests_per_second']:.3g}",
    "over stock": lambda row: number(row["over_stock"], "{:.2f}×"),
    "tokens/s of a row": lambda row: number(row["row_tokens_per_second"], "{:.3g}"),
    "tokens/s": lambda row: f"{row['tokens_per_second']:.3g}",
    "cached": lambda row: f"{row['cached_share']:.0%}",
    "first, s": lambda row: f"{row['first_ms'] / 1e3:.2f}",
    "first p99": lambda row: f"{row['first_ms_p99'] / 1e3:.2f}",
    "next, ms": lambda row: f"{row['next_ms']:.1f}",
    "next p99": lambda row: f"{row['next_ms_p99']:.1f}",
    "stock's drift": SERVING_COLUMNS["stock's drift"],
}

load_table = partial(timing_table, columns=COLUMNS, setting=("clients",))
