"""The tables that `python -m benchmarks serve` and `agent` print."""

from collections.abc import Sequence
from functools import partial

from saccade.eval.interval import wilson
from saccade.report.timings import SERVING_COLUMNS, timing_table
from saccade.report.wording import Columns, number


def right_of(turns: Sequence[Sequence[bool]]) -> str:
    """Right answers of all conversations with their 95% interval (Wilson); a dash where nothing was asked."""
    right, asked = sum(map(sum, turns)), sum(map(len, turns))
    return "{} of {} ({:.0%} to {:.0%})".format(right, asked, *wilson(right, asked)) if asked else "-"


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
DAY_COLUMNS: Columns = {
    "at once": lambda row: str(row["conversations"]),
    "policy": COLUMNS["policy"],
    "day, s": lambda row: f"{row['seconds']:.1f} ({number(row['day_over_stock'], '{:.2f}×')})",
    "decoded/s": lambda row: f"{row['tokens_per_second']:.3g} ({number(row['over_stock'], '{:.2f}×')})",
    "alone": lambda row: f"{row['alone_tokens_per_second']:.3g} ({number(row['alone_over_stock'], '{:.2f}×')})",
    "first, s": COLUMNS["first, s"],
    "p90": lambda row: f"{row['first_ms_p90'] / 1e3:.2f}",
    "next, ms": COLUMNS["next, ms"],
    "p99": COLUMNS["next p99"],
    "cached": lambda row: f"{sum(row['cached_tokens']) / len(row['cached_tokens']):,.0f}",
    "right": lambda row: right_of(row["right"]),
    "drift": COLUMNS["stock's drift"],
}
"""Tokens that are cached are the mean of all prompts'."""

load_table = partial(timing_table, columns=COLUMNS, setting=("clients",))
day_table = partial(timing_table, columns=DAY_COLUMNS, setting=("conversations",))
