"""Rectification as data: how often, whether the dense pass rewrites or decides, and when it is its turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..errors import PolicyError

Mode = Literal["overwrite", "verify"]

ALL = 2**62
"""A boundary behind everything, of what nobody rectifies or has looked at: all of it counts as clean."""


@dataclass(frozen=True, slots=True)
class Rectify:
    """After `every` sparse steps, one dense pass over their tokens (ReSA, section 2.2; TidalDecode, section 3.2).

    `mode` "overwrite" rewrites their keys and values. "verify" takes them as a draft and keeps what dense attention
    confirms (ReSA, appendix B), so that the model's output is that of dense decoding.

    Raises:
        PolicyError: an `every` below 1 or another mode.
    """

    every: int = 32
    mode: Mode = "overwrite"

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise PolicyError(f"every={self.every!r} is not valid: a whole number of sparse steps, at least 1")
        if self.mode not in ("overwrite", "verify"):
            raise PolicyError(f"mode={self.mode!r} is not valid: overwrite or verify")

    @classmethod
    def read(cls, value: Any) -> Rectify | None:
        """From what a constructor, JSON or a command line gives: None, 32, "32", "32:verify", "none", or a mapping.

        Raises:
            PolicyError: anything else, or an unknown key.
        """
        if value is None or isinstance(value, Rectify):
            return value
        if isinstance(value, Mapping):
            unknown = [key for key in value if key not in ("every", "mode")]
            if unknown:
                raise PolicyError(f"unknown key {unknown[0]!r}; its keys: every, mode")
            return cls(**value)
        if isinstance(value, str):
            if value in ("", "none"):
                return None
            every, colon, mode = value.partition(":")
            number: Any = int(every) if every.isascii() and every.isdigit() else every
            return cls(number, mode) if colon else cls(number)  # type: ignore[arg-type]  # the constructor looks
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            return cls(int(value))
        return cls(value)

    def to_dict(self) -> dict[str, Any]:
        """`every` and `mode`, as `read` takes them."""
        return asdict(self)

    def __str__(self) -> str:
        return str(self.every) if self.mode == "overwrite" else f"{self.every}:{self.mode}"


@dataclass(frozen=True, slots=True)
class Phase:
    """Rectification's rhythm behind the prompt: `every` sparse steps, then one that is dense and runs them again.

    `every` None: no dense pass ever comes. The phase counts from the prompt, whatever a budget covers.
    """

    every: int | None

    @property
    def period(self) -> int:
        """Decoded tokens after which everything repeats."""
        return 1 if self.every is None else self.every + 1

    def due(self, unclean: int, new: int = 1) -> bool:
        """Whether a call of `new` decoded tokens behind `unclean` ones runs those again first, and is dense itself.

        No call goes beyond `every` unclean tokens, so one of several is dense as soon as it would.
        """
        return self.every is not None and unclean + new > self.every

    def dense_at(self, decoded: int) -> bool:
        """Whether the token behind `decoded` others, fed one by one, is the one whose step is dense."""
        return self.every is not None and decoded % self.period == self.every

    def pieces(self, decoded: int, count: int) -> Iterator[int]:
        """How many of `count` tokens behind `decoded` others go together, so that each is treated as if it came alone.

        A dense pass takes place at the beginning of a call and all tokens of that call are dense, so its own token is a
        piece of one.
        """
        while count > 0:
            together = count if self.every is None else min(count, max(self.every - decoded % self.period, 1))
            yield together
            decoded, count = decoded + together, count - together


@dataclass(frozen=True, slots=True)
class Clean:
    """Positions below `boundary` hold keys and values that no sparse step wrote, or that were rectified since.

    Where the `phase` is that of no rectification, nothing moves the boundary: nobody waits for what is not clean.
    """

    phase: Phase
    boundary: int = ALL

    def after(self, start: int, count: int, *, dense: bool, covered: bool = False) -> Clean:
        """Behind a step that wrote `count` positions from `start` on, densely or not.

        A dense step cleans unless it begins above the boundary, with positions in between whose sets did not hold all
        tokens: `covered` says that they did. So does a single step whose turn it is and that was not set back.
        """
        settles = covered or start <= self.boundary if dense else count == 1 and self.phase.due(start - self.boundary)
        return self.at(start + count) if settles and start + count > self.boundary else self

    def taken_back(self, length: int) -> Clean:
        """Where only the first `length` positions are left."""
        return self.at(min(self.boundary, length))

    def at(self, boundary: int) -> Clean:
        """With another boundary, as of a cache that was filled unseen, which counts as clean."""
        return self if self.phase.every is None else replace(self, boundary=boundary)
