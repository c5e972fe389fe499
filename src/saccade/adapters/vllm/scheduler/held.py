"""Tokens that need not be sent to a worker, since they lie where it looks for them."""

from collections.abc import Iterator, Sequence
from typing import Any


class HeldTokens(Sequence[int]):
    """As long as a request's tokens, and all that it gives is the first of them.

    Model runner V2 takes the length of what a request begins with, and writes what it is given into the request's slot.
    One that it knows leaves its slot and takes the same one again. There its tokens lie, of which the latest may not be
    known on the host yet; and 131,072 numbers that need not be written are 20 ms of the host's time.
    """

    def __init__(self, first: int, length: int) -> None:
        self.first, self.length = first, length

    def __repr__(self) -> str:
        return f"{self.length} tokens that the worker holds"

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # Something, since vLLM was never made to write nothing.
        yield self.first

    def __getitem__(self, place: Any) -> Any:
        raise IndexError("these tokens are where the worker keeps them")
