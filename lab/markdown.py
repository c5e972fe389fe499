"""Tables in Markdown."""

from collections.abc import Collection, Iterable, Sequence

from saccade.report.wording import Columns, Row


def line(*cells: str) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> list[str]:
    """The first column and those of `words` hold words, the others figures."""
    align = ["|---", *("|---" if column in words else "|--:" for column in columns[1:]), "|"]
    return [line(*columns), "".join(align), *(line(*cells) for cells in rows)]


def table_of(rows: Iterable[Row], columns: Columns, words: Collection[str] = ()) -> list[str]:
    """The same of rows whose cells `columns` tell."""
    return table([*columns], ([cell(row) for cell in columns.values()] for row in rows), words)
