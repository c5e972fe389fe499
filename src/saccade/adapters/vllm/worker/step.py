"""vLLM's attention metadata of a step, as our layers read it."""

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
        start: int32 `[B]`, first new position of each row.
        count: host bound on the new tokens of a row.
    """

    rows: Rows
    start: Tensor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Who answers the rows of a step in a layer.

    Attributes:
        parent: metadata of vLLM's own kernel for the rows that attend to everything; None if there are none.
        sparse: the rows that decode under the policy; None if there are none.
        parent_tokens: those that the parent answers.
    """

    parent: Any | None
    sparse: Sparse | None = None
    parent_tokens: Tokens = ALL


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step, which all layers of an attention group share.

    Attributes:
        usual: who answers in all layers but those that are `dense`.
        written: its new tokens, rows with one apart from rows with many, so that none is padded to the others; none
            where no bounds of pages follow them.
        dense: metadata of vLLM's own kernel for all rows, which answers in layers whose heads are all dense; None: as
            in the others.
    """

    usual: Part
    written: tuple[Written, ...]
    dense: Any | None = None

    def part(self, layer: int) -> Part:
        """Who answers in a layer, by its number in the model; layers ask once each, in order."""
        sparse = self.usual.sparse
        if self.dense is None or sparse is None or not sparse.state.plan.roles.passive[layer]:
            return self.usual
        sparse.state.passed(layer, sparse.rows)
        return Part(self.dense)
