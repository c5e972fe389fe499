"""Tables as a terminal shows them."""

from types import ModuleType

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table


def printed(table: Table, width: int = 160) -> list[str]:
    """Lines of a table as a terminal shows them."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def said(table: Table) -> str:
    """All words of a table, however its lines are broken."""
    return " ".join(" ".join(printed(table)).split())


def kept_figures(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What a module exports from now on, as a file or into a page."""
    figures: list[Figure] = []
    export = "inline" if hasattr(module, "inline") else "as_svg"
    exported = getattr(module, export)

    def kept(figure: Figure, *name: str) -> str:
        figures.append(figure)
        return str(exported(figure, *name))

    monkeypatch.setattr(module, export, kept)
    return figures


def cells(table: Table, width: int = 160) -> list[list[str]]:
    return [line.split() for line in printed(table, width)]
