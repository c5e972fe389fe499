"""Options that several commands share, under one name and with one explanation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def at_least(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser of whole numbers whose error names the value and the valid ones."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise typer.BadParameter(f"{str(text)!r} is not valid; whole numbers from {minimum} to {maximum} are")
        return value

    return parse


Model = Annotated[
    str | None,
    typer.Option(
        metavar="DIR_OR_HUB_ID",
        help="A model folder or hub id (safetensors only, no remote code). Default: the bundled model.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, mps. auto: an accelerator if there is one.")
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, float32, bfloat16, float16. auto: what the checkpoint holds; "
        "float32 for the bundled model on a CPU, where it is faster.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        parser=at_least(0), metavar="N", help="Seed of everything random; the same seed gives the same answers."
    ),
]
Document = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A UTF-8 text file.", show_default=False),
]
