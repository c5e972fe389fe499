"""What is compared: how the index is kept up, in which order a cluster's chunks are taken, and two other methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a help text does not wait for torch
    from saccade.methods.policy import Policy

CLUSTERS = "lychee_cluster:form=paper"
Order = Literal["latest", "position", "query"]
"""Which chunks of a cluster come first: the latest ones, as the index has it; the earliest; or those whose own keys are
nearest to the query. It matters for the one cluster that does not fit whole."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """How an index comes to be: the policy, and whether it is built from nothing.

    From nothing means: where a measurement begins. Through its few queries it is kept up like the others.
    """

    policy: str
    anew: bool = False

    def bound(self, budget: int) -> Policy:
        """The policy with its budget; raises a PolicyError if that is too small for it."""
        from saccade.methods.policy import Policy

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
