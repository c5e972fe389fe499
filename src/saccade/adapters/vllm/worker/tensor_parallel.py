"""Tensor parallelism: each rank decides for its own heads, but one set for all heads needs every rank's scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ....plans.plan import Plan
from ....plans.roles import RoleMap
from ....selection.selector import Bytes, Index, ScoredSelector, Scorer
from ....types import KVView, Pooling

Gather = Callable[[Tensor], Tensor]
"""Joins every rank's `[B, G, N]` to `[B, ranks · G, N]`, in rank order, on every rank."""


def plan_of_rank(plan: Plan, rank: int, ranks: int, gather: Gather) -> Plan:
    """The part of a model's plan that one rank runs: its heads' roles, and a selector that agrees with the others.

    Args:
        plan: of the whole model.
        rank, ranks: of tensor parallelism; they divide the KV heads.
        gather: how scores are joined.
    """
    if ranks == 1:
        return plan
    heads = len(plan.roles.layers[0]) // ranks
    mine = slice(rank * heads, (rank + 1) * heads)
    selector = plan.selector
    if isinstance(selector, ScoredSelector) and selector.heads == "all":
        selector = replace(selector, scorer=GatheredScorer(selector.scorer, gather))
    return Plan(selector, RoleMap(tuple(roles[mine] for roles in plan.roles.layers)), plan.notes)


@dataclass(frozen=True, slots=True)
class GatheredScorer:
    """Another scorer's scores, of the heads of all ranks.

    Attributes:
        inner: scores this rank's heads.
        gather: how scores are joined.
    """

    inner: Scorer
    gather: Gather

    @property
    def unit(self) -> int:
        return self.inner.unit

    @property
    def pooling(self) -> Pooling:
        return self.inner.pooling

    @property
    def fused(self) -> bool:
        return self.inner.fused

    @property
    def bounds_page(self) -> int | None:
        return self.inner.bounds_page

    def new_index(self, kv: KVView) -> Index | None:
        return self.inner.new_index(kv)

    def score(self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None) -> Tensor:
        """Scores `[B, G of all ranks, N]`; N is the same on all ranks, which hold the same rows."""
        return self.gather(self.inner.score(q, kv, index, stored))

    def traffic(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        return self.inner.traffic(length, head_dim, itemsize)

    def upkeep(self, length: int, appended: int, rewritten: int, head_dim: int, itemsize: float) -> Bytes:
        return self.inner.upkeep(length, appended, rewritten, head_dim, itemsize)
