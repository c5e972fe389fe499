"""The table that a comparison prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .wording import COLUMNS, TOKEN_RECALL, cells, lengths

WIDE = 100
"""Columns from which on a terminal has room for token recall."""


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
    for number in shown:
        # Headers of two lines let a row fit into 80 columns; beyond that the policies' options wrap, no number does.
        header = "\n".join(COLUMNS[number].rsplit(" ", 1))
        table.add_column(header, justify="right" if number else "left", no_wrap=number > 0, overflow="fold")
    previous = None
    for row in results["rows"]:
        if previous not in (None, row["label"]):
            table.add_section()
        previous = row["label"]
        texts = cells(row)
        table.add_row(*(Text(texts[number]) for number in shown))
    return table
