"""`python -m claims`: the ledger as a table, one claim, or all of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli.group import INTERRUPTED, OneLineErrors
from saccade.cli.options import Device, Dtype, Model, count, flag, words
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from .claim import Listed

FOLDER = Path("results") / "claims"

Draft = Annotated[bool, flag("--draft", "Run though the criteria are not committed; such a result is never recorded.")]
Record = Annotated[bool, flag("--record", "Put the result into docs/results/claims.")]
Threads = Annotated[int, count("CPU threads of decoding.", maximum=1024)]
Workers = Annotated[
    int, count("Claims at a time, beside --all, each on one thread. 0: one a core; on a CUDA device one.", 0, 1024)
]
Folder = Annotated[
    Path | None, words("DIR", "Results folder; an interrupted run goes on there. Default: results/claims/NUMBER.")
]


class ClaimsByNumber(OneLineErrors):
    """A group in which a claim's number is a command: `C8` stands for `run C8`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See `click.Group.resolve_command`."""
        if self.get_command(ctx, args[0]) is None and args[0][:1].lower() == "c" and args[0][1:2].isdigit():
            args = ["run", *args]
        return super().resolve_command(ctx, args)


def show_ledger() -> None:
    """Print every claim with its verdicts."""
    from rich.text import Text

    from saccade.cli.terminal import quiet_libraries, show
    from saccade.report.table import new_table

    from .discovery import found
    from .results import recorded

    quiet_libraries()
    held, claims = recorded(), found()
    columns = ("id", "claim", "source", "verdict", "n", "on", "date")
    table = new_table(f"{len(claims)} claims", columns, words=("claim", "source", "verdict", "on"))
    for number, listed in claims.items():
        claim = listed.claim
        told = (number, claim.sentence, f"{claim.source.paper}, {claim.source.place}")
        verdicts = held.get(number, [{"verdict": "not run"}])
        for place, result in enumerate(verdicts if claim.withdrawn is None else [{"verdict": "withdrawn"}]):
            known = (str(result.get(name, "")) for name in ("verdict", "n", "on", "date"))
            table.add_row(*map(Text, (*(told if place == 0 else ("", "", "")), *known)))
    show(table, "python -m claims C8 runs one; --help tells more")


def run(
    number: Annotated[str, typer.Argument(metavar="NUMBER", help="The claim, such as C8.")],
    model: Model = None,
    output_dir: Folder = None,
    draft: Draft = False,
    record: Record = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 1,
) -> None:
    """Run one claim on a model; `python -m claims C8` is short for it.

    The folder gets `result.json`, `picture.svg` and `samples.jsonl`; with the same folder an interrupted run goes on.

    Examples:

      python -m claims C8

      python -m claims C8 --model ./Qwen3-0.6B --output-dir results/C8-qwen
    """
    from .discovery import one
    from .study import Study

    listed = one(number)
    _run(listed, Study(model, output_dir or FOLDER / listed.number, device, dtype, threads), draft=draft, record=record)


def run_all(model: str | None, device: str, workers: int, *, record: bool) -> None:
    """Run all, several at a time; what lies in a claim's folder is not measured anew."""
    from saccade.cli.terminal import output, progress, quiet_libraries, say

    from .all import at_a_time
    from .all import run_all as run
    from .discovery import found
    from .results import record as enter

    quiet_libraries()
    claims = found()
    try:
        with progress(len(claims)) as advance:
            for number, ended in run(claims, FOLDER, model, device, at_a_time(workers, device)):
                if isinstance(ended, str):
                    say(output(), f"{number}: {ended}")
                else:
                    _show(claims[number], ended, FOLDER / number)
                    if record:
                        enter(ended, claims[number])
                advance(number)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on")
        raise typer.Exit(INTERRUPTED) from None


def _run(listed: Listed, study: Any, *, draft: bool, record: bool) -> None:
    from saccade.cli.terminal import progress, quiet_libraries

    from .results import record as enter
    from .running import Run

    quiet_libraries()
    if draft and record:
        raise SaccadeError("--draft and --record exclude each other: a draft never enters the ledger")
    work = Run.check(listed, study, draft=draft)
    try:
        with progress(work.units) as advance:
            work.run(advance)
    except KeyboardInterrupt:
        typer.echo(f"{listed.number}: interrupted; the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    found = work.finish()
    _show(listed, found, study.folder)
    if record:
        enter(found, listed)


def _show(listed: Listed, found: dict[str, Any], folder: Path) -> None:
    """The tests of a result as a table."""
    from rich.text import Text

    from saccade.cli.terminal import show
    from saccade.report.table import new_table

    from .study import RESULT
    from .wording import effect, wanted

    title = f"{listed.number}: {listed.claim.sentence}"
    table = new_table(title, ("effect", "found", "wanted", "n", "verdict"), words=("effect", "verdict"))
    for test in (*found["premises"], *found["tests"]):
        beside = "" if test["decides"] else " (beside)"
        cells = (test["effect"] + beside, effect(test), wanted(test), str(test["n"]), test["verdict"])
        table.add_row(*map(Text, cells))
    told = [f"verdict: {found['verdict']}{' (a draft)' if found['draft'] else ''}", *filter(None, [found["power"]])]
    show(table, *told, f"results: {folder / RESULT}")
