"""Tables for a terminal: what all have in common, and the one that a comparison prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill as fill_text
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .wording import COLUMNS, Row, lengths

WIDE = 100
"""Columns from which on a terminal has room for further recalls."""

_SPARED = ("token recall of heads with a set", "attention recall with dense heads as 1")


def new_table(title: str, columns: Iterable[str], words: Iterable[str] = (), notes: Sequence[str] = ()) -> Table:
    """A table without rows yet; brackets in its title and notes are no markup.

    Args:
        columns: headers. Numbers stand to the right and are never broken.
        words: headers of the columns that hold words.
        notes: lines below it.
    """
    caption = Text("\n".join(notes)) if notes else None
    table = Table(title=Text(title), caption=caption, title_justify="left", caption_justify="left",
                  box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    words = set(words)
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=column not in words,
                         overflow="fold")  # fmt: skip
    return table


def fill(table: Table, rows: Iterable[Row], cells: Iterable[Callable[[Row], str]], *keys: str) -> Table:
    """Add rows, with a line wherever one of the values under `keys` changes; brackets in cells are no markup."""
    cells, previous = list(cells), None
    for row in rows:
        setting = [row[key] for key in keys]
        if previous not in (None, setting):
            table.add_section()
        previous = setting
        table.add_row(*(Text(cell(row)) for cell in cells))
    return table


def comparison_table(results: Mapping[str, Any], notes: Sequence[str], width: int = WIDE) -> Table:
    """Rows of `results.json` as a table, with the setting above and the notes below.

    Args:
        results: content of `results.json`.
        notes: what the user should know.
        width: columns of the terminal; a narrow one is spared the second and third kind of recall.
    """
    shown = {name: cell for name, cell in COLUMNS.items() if width >= WIDE or name not in _SPARED}
    here = results["environment"]
    asked, where = here["questions"], lengths(here["context_tokens"])
    ended = "" if results["complete"] else " (interrupted)"
    title = f"{asked} questions in {where}: {here['document']}, model {here['model']}{ended}"
    # Narrow headers let a row fit into 80 columns; beyond that the policies' options wrap, no number does.
    headers = [fill_text(name, 11) for name in shown]
    return fill(new_table(title, headers, headers[:1], notes), results["rows"], shown.values(), "label")
