"""An index of a variant, brought up as in decoding."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lab.whole_tree import WholeTreeLayer
from saccade.decode.state import own_indexes
from saccade.plans.plan import Plan
from saccade.selection.clusters.index import ClusterLayer
from saccade.text.history import TokenHistory
from saccade.types import KVView, Selection

from .capture import Reading
from .names import Order
from .orders import largest_cluster, search


class Kept:
    """The indexes of all measured layers beside a row that has been read to `past` tokens, brought up as in decoding.

    Args:
        plan: whose selector chooses.
        levels: delimiter level of every vocabulary id.
        prompt: tokens that were read densely at once.
        past: tokens that the row has before the first step, of which no index knows yet.
    """

    def __init__(self, plan: Plan, levels: Sequence[int], reading: Reading, prompt: int, past: int) -> None:
        self._plan, self._tokens, self._length = plan, reading.tokens, 0
        self._history = TokenHistory(levels)
        self._indexes = own_indexes(plan, self._history)
        self._record(past)
        self._history.prompt = prompt

    def step(self, length: int, views: Mapping[int, KVView]) -> None:
        """The row has grown to `length`: bring every layer's index up to date."""
        self._record(length)
        for layer, view in views.items():
            self._indexes.of(layer, view)

    def choose(self, order: Order | None, layer: int, q: Tensor, kv: KVView, scale: float) -> Selection:
        """The set of the newest token's query `[1, Hq, d]`."""
        index = self._indexes.of(layer, kv)
        if order is None:
            assert self._plan.selector is not None, "only policies with a selector are compared"
            return self._plan.selector.select(q, kv, index, None, scale)
        assert isinstance(index, (ClusterLayer, WholeTreeLayer)), "only clusters have an order"
        return search(index, q, kv, order)

    def largest_cluster(self, layer: int, kv: KVView) -> float | None:
        """The largest share of chunks that one cluster of a head holds; None without clusters."""
        index = self._indexes.of(layer, kv)
        return largest_cluster(index) if isinstance(index, (ClusterLayer, WholeTreeLayer)) else None

    def _record(self, stop: int) -> None:
        past = self._length
        self._history.record(past, stop - past, 1, self._tokens[:, past:stop], None)
        self._length = stop
