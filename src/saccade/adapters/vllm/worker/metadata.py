"""What is prepared once for a step and read by all its layers: which rows decode how, and what is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....decode.state import DecodeState
from ....types import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Rows that decode together.

    Attributes:
        state: theirs.
        rows: where their tokens lie.
        tokens: int64, which positions of the flat batch are theirs; None: all, in order.
    """

    state: DecodeState
    rows: Rows
    tokens: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What a step writes into the cache.

    Attributes:
        rows: all rows of the batch.
        start: int32 `[B]`, first new position of each row.
        count: host bound on the new tokens of a row.
    """

    rows: Rows
    start: Tensor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class StepMetadata:
    """vLLM's attention metadata of a step, all layers of an attention group share it.

    Attributes:
        parent: metadata of vLLM's own kernel for the rows that attend to everything; None if there are none.
        parent_tokens: int64, their positions in the flat batch; None: all.
        groups: rows that decode under the policy.
        written: the step's new tokens; rows with one apart from rows with many, so that none is padded to the others.
        num_actual_tokens: positions of the flat batch that are not padding.
    """

    parent: Any | None
    parent_tokens: Tensor | None
    groups: list[Group]
    written: tuple[Written, ...]
    num_actual_tokens: int
