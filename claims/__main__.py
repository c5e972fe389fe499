"""`python -m claims`: the experiments, a command each."""

from __future__ import annotations

import typer

from saccade.cli.group import OneLineErrors

from .accumulation.command import accumulation
from .eviction.command import eviction
from .promise.command import halvings, promise
from .upkeep.command import upkeep

app = typer.Typer(name="claims", cls=OneLineErrors, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(accumulation)
app.command()(eviction)
app.command()(promise)
app.command()(halvings)
app.command()(upkeep)


@app.callback()
def _claims() -> None:
    """Check what the papers claim, and what `saccade tune` does."""


if __name__ == "__main__":
    app()
