"""Tables for a terminal: what all have in common, and the one that a comparison prints."""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill as fill_text
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .labels import labelled, meanings
from .wording import COLUMNS, FRAME, KEYS, READ, Columns, Row, lengths, with_terms

WIDE = 100
"""Columns that a table of policies takes at most; a terminal of fewer is spared the second kind of recall."""

_ATTENDED = "share of cache"
_SPARED, _NARROW = "attention recall with dense heads as 1", "token recall of heads with a set"


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


def fill(table: Table, rows: Iterable[Row], columns: Columns, *keys: str, bold: str | None = None) -> Table:
    """Add rows, with a line wherever one of the values under `keys` changes; brackets in cells are no markup.

    A row is bold if it has something under that key.
    """
    previous = None
    for row in rows:
        setting = [row[key] for key in keys]
        if previous not in (None, setting):
            table.add_section()
        previous = setting
        table.add_row(*(Text(cell(row)) for cell in columns.values()), style="bold" if bold and row[bold] else None)
    return table


def comparison_table(results: Mapping[str, Any], width: int = WIDE, *, brief: bool = False) -> Table:
    """Rows of `results.json` as a table for a terminal of such a `width`, with the setting above.

    Below it what labels stand for, and the notes; `brief`: without these, and without lines between policies.
    """
    here, rows = results["environment"], labelled(results)
    columns = with_terms(COLUMNS, rows, _ATTENDED)
    spared = {_SPARED, *((_NARROW, FRAME) if width < WIDE else ()), *((_ATTENDED,) if READ in columns else ())}
    spared |= {_NARROW} if KEYS in columns else set()
    shown = {name: cell for name, cell in columns.items() if name not in spared}
    asked, where = here["questions"], lengths(here["context_tokens"])
    ended = "" if results["complete"] else " (interrupted)"
    title = f"{asked} questions in {where}: {here['document']}, model {here['model']}{ended}"
    # Narrow headers leave the policies most of the room.
    headers = [fill_text(name.removeprefix("attention "), 6, break_long_words=False) for name in shown]
    if brief:
        return fill(new_table(title, headers, headers[:1]), rows, shown)
    notes = [*meanings({row["family"]: row["label"] for row in rows}), *results["notes"]]
    return fill(new_table(title, headers, headers[:1], notes), rows, shown, "label")
