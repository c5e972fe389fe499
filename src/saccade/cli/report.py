"""`saccade report`: the table and the page of a run that is over."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import OutputError


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Results folder of `saccade compare` or `saccade tune`.")
    ],
) -> None:
    """Print a run's table and make its `report.html` again, from what its folder holds; nothing is asked anew.

    Examples:

      saccade report results/demo
    """
    from ..calibrate.tune import RESULTS as TUNED
    from ..eval.output import REPORT, RESULTS, read_json
    from ..files import replace_text
    from ..report.page import comparison_report, tune_page
    from ..report.table import WIDE, comparison_table
    from ..report.tune import front_table
    from .terminal import output, show

    if (folder / RESULTS).is_file():
        path, table = comparison_report(folder), comparison_table(read_json(folder / RESULTS), output().width)
    elif (folder / TUNED).is_file():
        tuned = read_json(folder / TUNED)
        path, table = folder / REPORT, front_table(tuned)
        replace_text(path, tune_page(tuned))
    else:
        raise OutputError(f"{str(folder)!r} holds neither {RESULTS} of `saccade compare` nor {TUNED} of `saccade tune`")
    show(table, f"report: {path}", widest=WIDE)
