"""What is compared: how the index is kept up, in which order a cluster's chunks are taken, and two other methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from saccade.decode.state import own_indexes
from saccade.methods.policy import Policy
from saccade.plans.plan import Plan
from saccade.selection.clusters.index import ClusterLayer
from saccade.text.history import TokenHistory
from saccade.types import KVView, Selection

from ..methods.whole_tree import WholeTreeLayer
from .capture import Reading
from .orders import Order, largest_cluster, search

CLUSTERS = "lychee_cluster:form=paper"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """How an index comes to be: the policy, and whether it is built from nothing.

    From nothing means: where a measurement begins. Through its few queries it is kept up like the others.
    """

    policy: str
    anew: bool = False

    def bound(self, budget: int) -> Policy:
        """The policy with its budget; raises a PolicyError if that is too small for it."""
        return Policy.from_spec(self.policy).with_budget(budget)


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the picture: an index, and the order in which it is searched; None: the product's own search."""

    upkeep: Upkeep
    order: Order | None = None


_LAZY, _REPLANTED = Upkeep("lazy_clusters"), Upkeep(CLUSTERS)

VARIANTS: dict[str, Variant] = {
    "lazy": Variant(_LAZY),
    "lazy/position": Variant(_LAZY, "position"),
    "lazy/query": Variant(_LAZY, "query"),
    "replanted": Variant(_REPLANTED),
    "replanted/position": Variant(_REPLANTED, "position"),
    "replanted/query": Variant(_REPLANTED, "query"),
    "rebuilt": Variant(Upkeep(CLUSTERS, anew=True)),
    "rebuilt-whole": Variant(Upkeep("lazy_clusters", anew=True)),
    "streaming": Variant(Upkeep("streaming")),
    "quest": Variant(Upkeep("quest")),
}
"""By name; "rebuilt-whole" is the paper's planting of all chunks together, done again for every measurement."""


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
