"""vLLM's attention metadata of a step, as our layers read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....types import Rows
from .sparse import Sparse
from .tokens import ALL, Tokens

BuildParent = Callable[[Any, bool], Any]
"""Makes the metadata of vLLM's own kernel from a `CommonAttentionMetadata`.

True: without a schedule, of which vLLM has memory for one in a step.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What a step writes into the cache.

    Attributes:
        rows: all rows of the batch.
        start: int32 `[B]`, first new position of each row; None: its last.
        count: host bound on the new tokens of a row; 0: of one each, whose pages are bounded when they are scored.
    """

    rows: Rows
    start: Tensor | None
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step, which all layers of an attention group share: who answers its rows.

    Attributes:
        parent: metadata of vLLM's own kernel for the rows that attend to everything; None if there are none.
        sparse: the rows that decode under the policy; None if there are none.
        parent_tokens: those that the parent answers.
        written: its new tokens, rows with one apart from rows with many, so that none is padded to the others; none
            where no bounds of pages follow them.
        dense: metadata of vLLM's own kernel for all rows, which alone answers in layers whose heads are all dense;
            None: they are as the others.
    """

    parent: Any | None
    sparse: Sparse | None = None
    parent_tokens: Tokens = ALL
    written: tuple[Written, ...] = ()
    dense: Any | None = None

    def part(self, layer: int) -> Step:
        """As one layer sees it, by its number in the model; layers ask once each, in order."""
        if self.dense is None or self.sparse is None or not self.sparse.state.plan.roles.passive[layer]:
            return self
        self.sparse.state.passed(layer, self.sparse.rows)
        return Step(self.dense)
