"""The only mutable object of a batch of sequences: rolling selection, indexes, counters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..kernels.dense_decode_scores.api import dense_decode_scores
from ..kernels.hybrid_decode.api import hybrid_decode
from ..kernels.sparse_decode.api import sparse_decode
from ..plans.plan import Plan
from ..plans.rectify import ALL
from ..plans.roles import HeadSpan
from ..text.feed import TokenFeed
from ..text.history import TokenHistory
from ..types import KVView, Rows, Selection, Softmax, Workspace
from .counters import Counters, Usage
from .indexes import Indexes
from .pages import PageIndexes
from .rolling import RollingSelection
from .rows import RowSlots


class Observer(Protocol):
    """Sees every decoded query with the set it attended to; for measuring, never for deciding."""

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        """q `[B, Hq', d]`, cache and softmax of the span's heads; `selection` is None if it attended to all tokens."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionOperations:
    """What layers attend with: the kernels' operations, or others with their contracts.

    Attributes:
        dense: as `kernels.dense_decode_scores`, where all heads attend to everything.
        sparse: as `kernels.sparse_decode`, where all attend to their sets.
        hybrid: as `kernels.hybrid_decode`, where some do this and some that.
        name: for people, who should know which ones run.
    """

    dense: Callable[..., tuple[Tensor, Tensor | None]] = dense_decode_scores
    sparse: Callable[..., Tensor] = sparse_decode
    hybrid: Callable[..., tuple[Tensor, Tensor | None]] = hybrid_decode
    name: str = "saccade's own operations"


class DecodeState:
    """State of one batch of sequences under a plan.

    Args:
        plan: what runs.
        counters: where steps and attended tokens are summed; may be shared by several states.
        observers: called for every span; empty in timed runs.
        exhaustive_is_dense: skip selection while the budget covers every row (the set would be all tokens).
        history: what is fed to the model; filled by the adapter.
        indexes: where they lie if not in this state, such as beside the pages of a server's cache.
        attention: what layers attend with.
        workspace: memory that it is given.
    """

    def __init__(
        self,
        plan: Plan,
        counters: Counters,
        observers: Sequence[Observer] = (),
        exhaustive_is_dense: bool = True,
        history: TokenHistory | None = None,
        indexes: Indexes | None = None,
        attention: AttentionOperations | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.plan = plan
        self.counters = counters
        self.observers = tuple(observers)
        self.exhaustive_is_dense = exhaustive_is_dense
        self.history = TokenHistory() if history is None else history
        self.indexes: Indexes = own_indexes(plan, self.history) if indexes is None else indexes
        self.attention = AttentionOperations() if attention is None else attention
        self.workspace = workspace
        self._rolling: list[RollingSelection] = []
        self._judged = (-1, False)
        self._usages: list[Usage] = []

    def fresh(self) -> DecodeState:
        """The state of new sequences under the same plan, counters and observers."""
        history = TokenHistory(self.history.levels)
        attention = self.attention
        return DecodeState(
            self.plan, self.counters, self.observers, self.exhaustive_is_dense, history, attention=attention
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeState:
        """For a copied cache: indexes of its own, counted and observed by the same run."""
        twin = self.fresh()
        # One memo for both: the copied indexes read the copied history.
        twin.history = copy.deepcopy(self.history, memo)
        twin.indexes = copy.deepcopy(self.indexes, memo)
        return twin

    def begin(self, past: int, clean: int = ALL) -> None:
        """Start a call on a cache of `past` slots: forget the last call's sets and tokens taken back since.

        Slots below `clean` hold what no sparse step wrote, or what was rectified.
        """
        self._rolling.clear()
        self._usages.clear()
        self.indexes.begin(past, clean)

    def needs_selection(self, max_len: int) -> bool:
        """Whether some row may be longer than its set."""
        # All layers of a step ask the same.
        if self._judged[0] != max_len:
            covered = self.exhaustive_is_dense and self.plan.covers(max_len)
            self._judged = max_len, self.plan.selector is not None and not covered
        return self._judged[1]

    def rolling(self, position: int) -> RollingSelection:
        """The rolling selection of new token number `position` of the call at hand; each token chooses for itself."""
        while len(self._rolling) <= position:
            self._rolling.append(RollingSelection())
        return self._rolling[position]

    def account(self, layer: int, q: Tensor, kv: KVView, softmax: Softmax, position: int, sparse: bool) -> None:
        """Note what a layer's heads attended to and show it to the observers; not `sparse`: to all tokens.

        The last layer counts what all have noted.
        """
        kv_heads, group, spans = kv.kv_heads, q.shape[1] // kv.kv_heads, self.plan.roles.spans
        for span in spans[layer]:
            heads = span.start, span.stop
            everything = not sparse or span.role.attends_to_all
            selection = None if everything else self.rolling(position).latest(kv.rows).heads(*heads, kv_heads)
            sets = () if selection is None else self._counted(selection, kv.rows)
            self._usages.append(Usage(layer, (span.stop - span.start) / kv_heads, kv.rows, *sets))
            for observer in self.observers:
                first, last = span.start * group, span.stop * group
                seen = q[:, first:last], kv.heads(*heads), selection, softmax.heads(first, last)
                observer.observe(layer, span, *seen)
        self._end(layer)

    def _counted(self, selection: Selection, rows: Rows) -> tuple[Tensor, int, Tensor | None, Tensor | None]:
        """What `Usage` wants to know of sets; whether they hold the current unit only where it may be left out."""
        counts, unit, last = selection.counts, selection.unit, None
        if unit > 1 and self.plan.selector is not None and self.plan.selector.granule != unit:
            last = (selection.ids == (rows.units(unit) - 1)[:, None, None]).any(dim=-1)
        return counts, unit, selection.overflowed, last

    def passed(self, layer: int, rows: Rows) -> None:
        """Note that all heads of a layer attend to all tokens, which somebody else computes."""
        self._usages.append(Usage(layer, 1.0, rows))
        self._end(layer)

    def _end(self, layer: int) -> None:
        if layer == self.plan.roles.concerned[-1]:
            noted, self._usages = self._usages, []
            self.counters.add(noted)


def own_indexes(plan: Plan, text: TokenFeed) -> Indexes:
    """Those of one batch alone: in slots where the selector has such an index, else beside the cache's pages."""
    return RowSlots(plan, text) if plan.owns_index else PageIndexes(plan)
