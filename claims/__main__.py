"""`python -m claims`: the papers' claims and their verdicts; and the experiments, a command each."""

from typing import Annotated

import typer

from saccade.cli.options import Device, Model, flag
from saccade.errors import SaccadeError

from .accumulation.command import accumulation
from .comparison.command import compare
from .eviction.command import eviction
from .gates.command import gates, roles
from .judging.command import ClaimsByNumber, Record, Workers, run, run_all, show_ledger
from .promise.command import promise
from .reasoning.command import reasoning
from .upkeep.command import upkeep

app = typer.Typer(
    name="claims", cls=ClaimsByNumber, invoke_without_command=True, subcommand_metavar="[NUMBER | COMMAND]",
    pretty_exceptions_enable=False,
)  # fmt: skip
app.command()(run)
app.command()(accumulation)
app.command()(compare)
app.command()(eviction)
app.command()(gates)
app.command()(roles)
app.command()(promise)
app.command()(reasoning)
app.command()(upkeep)


@app.callback()
def _claims(
    context: typer.Context,
    every: Annotated[bool, flag("--all", "Run all claims.")] = False,
    model: Model = None,
    device: Device = "auto",
    record: Record = False,
    workers: Workers = 0,
) -> None:
    """Check what the papers claim, and what `saccade tune` does; without a command: the ledger of verdicts.

    Examples:

      python -m claims

      python -m claims C8

      python -m claims --all --model ./Qwen3-0.6B
    """
    if every and context.invoked_subcommand is None:
        run_all(model, device, workers, record=record)
    elif (model, device, record, workers) != (None, "auto", False, 0):
        raise SaccadeError("--model, --device, --record and --workers stand behind the claim's number, or beside --all")
    elif context.invoked_subcommand is None:
        show_ledger()


if __name__ == "__main__":
    app()
