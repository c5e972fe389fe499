"""How rows are put into words in tables and figures; what was not measured is a dash."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..eval.output import grouped as grouped

Row = Mapping[str, Any]

Columns = Mapping[str, Callable[[Row], str]]
"""Headers, and what stands below them."""

NOTHING = "-"

RECALL = "recall of\nheads with\na set"
"""Attention recall where headers are narrow."""

COLUMNS: Columns = {
    "policy": lambda row: row["label"],
    "budget": lambda row: number(row["budget"], "{:,}"),
    "right": lambda row: f"{round(row['correct'], 2)}/{row['n']}",
    "95% interval": lambda row: "{:.2f}-{:.2f}".format(*row["interval"]) if row["n"] else NOTHING,
    "speed vs dense": lambda row: number(row["speedup"], "{:.2f}x"),
    "ms per token": lambda row: number(row["ms_per_token"], "{:.2f}"),
    "share of cache": lambda row: number(row["share_attended"], "{:.1%}"),
    "attention recall of heads with a set": lambda row: number(row["recall"], "{:.2f}"),
    "token recall of heads with a set": lambda row: number(row["token_recall"], "{:.2f}"),
    "attention recall with dense heads as 1": lambda row: number(row["recall_with_dense"], "{:.2f}"),
}
"""One row of `results.json`, labelled, as text; what decides comes first."""


READ, FRAME = "cache read, index too", "sinks+ window, dense layers"
TERMS: Columns = {
    READ: lambda row: number(row["cache_read"], "{:.1%}"),
    FRAME: lambda row: frame(row),
}
"""On which terms policies are compared; see `eval.entry.terms_of`."""

KEYS = "key-token divergence"
"""Shown where `saccade compare --probe` has told texts; see `eval.divergence.Divergence.merit`."""


def with_terms(columns: Columns, rows: Iterable[Row], behind: str) -> Columns:
    """Columns with those of `TERMS` behind one of them, where rows tell: earlier results do not."""
    if all("key_divergence" in row for row in rows):
        columns = {**columns, KEYS: lambda row: number(row["key_divergence"], "{:.3f}")}
    if not all("cache_read" in row for row in rows):
        return columns
    place = list(columns).index(behind) + 1
    return dict([*list(columns.items())[:place], *TERMS.items(), *list(columns.items())[place:]])


def lengths(contexts: Sequence[int]) -> str:
    """How many contexts, and how long."""
    shortest, longest = min(contexts), max(contexts)
    span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    return f"{len(contexts)} context{'s' if len(contexts) > 1 else ''} of {span} tokens"


def number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def frame(row: Row) -> str:
    """First and last tokens in every set, and how many layers are dense."""
    kept = NOTHING if row["frame"] is None else "{:,}+{:,}".format(*row["frame"])
    return f"{kept}, {row['dense_layers']}"
