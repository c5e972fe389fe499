"""How rows are put into words in tables and figures; what was not measured is a dash."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Row = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)

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


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Rows by what `key` says of them, in order of appearance."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def lengths(contexts: Sequence[int]) -> str:
    """How many contexts, and how long."""
    shortest, longest = min(contexts), max(contexts)
    span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    return f"{len(contexts)} context{'s' if len(contexts) > 1 else ''} of {span} tokens"


def number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
