"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def line(*cells: str) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"


def head(columns: Sequence[str], words: int | None = None) -> list[str]:
    """The names of columns, of which the first `words` hold words and the others figures; None: all hold words."""
    words = len(columns) if words is None else words
    return [line(*columns), "|---" * words + "|--:" * (len(columns) - words) + "|"]
