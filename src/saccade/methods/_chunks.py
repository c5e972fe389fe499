"""The options that cut text into chunks, shared by the methods that score them by Quest's bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .options import Whole

Chunking = Annotated[
    Literal["fixed", "text"],
    Field(description="fixed or text: units of one length, or chunks cut where the text breaks (LycheeCluster, 3.1)"),
]
ShortestChunk = Annotated[
    Annotated[Whole, Field(ge=1)] | None,
    Field(description="chunking=text: fewest tokens of a chunk; not given: half a page"),
]
LongestChunk = Annotated[
    Annotated[Whole, Field(ge=1)] | None,
    Field(description="chunking=text: most tokens of a chunk; not given: a page and a quarter"),
]


def check_chunking(chunking: str, **sizes: int | None) -> None:
    """Refuse sizes of chunks where there are none.

    Raises:
        ValueError: one line for `PolicyError`.
    """
    for name, value in sizes.items():
        if value is not None and chunking != "text":
            raise ValueError(f"{name}={value} belongs to chunking=text, but chunking is {chunking}")
