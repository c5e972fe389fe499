"""The command line. Commands import what they need when they run: `--help` must not wait for torch."""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .calibrate import calibrate
from .compare import compare
from .doctor import doctor
from .generate import generate
from .group import NeedsEval, OneLineErrors
from .policies import policies
from .report import report
from .serve import SETTINGS, serve
from .tune import tune

app = typer.Typer(
    name="saccade",
    cls=OneLineErrors,
    rich_markup_mode="markdown",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _saccade(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sparse decoding attention for long-context language models.

    A policy decides which cached tokens the attention reads for every new token. `saccade compare` shows
    what that costs in answers and saves in time, on a bundled model and a text that every Python carries; nothing is
    downloaded.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(cls=NeedsEval)(compare)
app.command()(doctor)
app.command()(generate)
app.command()(policies)
app.command(cls=NeedsEval)(report)
app.command(context_settings=SETTINGS)(serve)
app.command(cls=NeedsEval)(tune)
app.add_typer(calibrate, name="calibrate")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of `saccade` and of `python -m saccade`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal without UTF-8 cannot show must not end a command
    app()
