"""`saccade policies`: what there is to choose from."""

from __future__ import annotations

from typing import Any


def policies() -> None:
    """List the policies, their options with defaults, and where they come from.

    Options are written behind the name: less_is_more:budget=256,reselect=6. Lists join with +: reselect=6+9.
    """
    # Imported here, so that --help does not wait for torch.
    from rich import box
    from rich.table import Table

    from ..registry import policies as known
    from .terminal import output

    console = output()
    for description in known().values():
        console.print(f"[bold]{description.name}[/bold]  {description.summary}", highlight=False)
        if description.source != "-":
            console.print(f"  {description.source}", highlight=False)
        table = Table("option", "default", "meaning", box=box.SIMPLE_HEAD)
        for name, default in description.defaults.items():
            table.add_row(name, _written(default), description.help[name])
        console.print(table if table.row_count else "")


def _written(default: Any) -> str:
    if default is None:
        return "-"
    return "+".join(map(str, default)) if isinstance(default, tuple) else str(default)
