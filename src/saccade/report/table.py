"""Tables for a terminal: what all have in common, and the one that a comparison prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .wording import COLUMNS, TOKEN_RECALL, Row, cells, lengths

WIDE = 100
"""Columns from which on a terminal has room for token recall."""


def new_table(title: str, columns: Iterable[str], words: Iterable[str] = (), notes: Sequence[str] = ()) -> Table:
    """A table without rows yet; brackets in its title and notes are no markup.

    Args:
        columns: headers. Numbers stand to the right and are never broken.
        words: headers of the columns that hold words.
        notes: lines below it.
    """
    table = Table(
        title=Text(title),
        caption=Text("\n".join(notes)) if notes else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    words = set(words)
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=column not in words,
                         overflow="fold")  # fmt: skip
    return table


def with_sections(table: Table, rows: Iterable[Row], *keys: str) -> Iterator[Row]:
    """The rows, with a line in the table wherever one of these values changes."""
    previous = None
    for row in rows:
        setting = [row[key] for key in keys]
        if previous not in (None, setting):
            table.add_section()
        previous = setting
        yield row


def comparison_table(results: Mapping[str, Any], notes: Sequence[str], width: int = WIDE) -> Table:
    """Rows of `results.json` as a table, with the setting above and the notes below.

    Args:
        results: content of `results.json`.
        notes: what the user should know.
        width: columns of the terminal; a narrow one is spared token recall.
    """
    shown = [number for number in range(len(COLUMNS)) if width >= WIDE or number != TOKEN_RECALL]
    here = results["environment"]
    asked, where = here["questions"], lengths(here["context_tokens"])
    title = f"{asked} questions in {where}: {here['document']}, model {here['model']}"
    if not results["complete"]:
        title += " (interrupted)"
    # Headers of two lines let a row fit into 80 columns; beyond that the policies' options wrap, no number does.
    headers = ["\n".join(COLUMNS[number].rsplit(" ", 1)) for number in shown]
    table = new_table(title, headers, headers[:1], notes)
    for row in with_sections(table, results["rows"], "label"):
        texts = cells(row)
        table.add_row(*(Text(texts[number]) for number in shown))
    return table
