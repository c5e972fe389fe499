"""`python -m testbed fetch NAME`: a published model to measure on."""

import typer

from saccade.cli.group import OneLineErrors

from .fetch import fetch

app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, pretty_exceptions_enable=False)
app.callback()(lambda: None)  # else the only command would have no name
app.command()(fetch)

if __name__ == "__main__":
    app()
