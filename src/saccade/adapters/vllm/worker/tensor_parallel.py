"""Tensor parallelism: each rank decides for its own heads, but one set for all heads needs every rank's scores."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ....plans.plan import Plan
from ....plans.roles import RoleMap
from ....selection.index import Index
from ....selection.selector import ScoredSelector
from ....types import KVView, Selection

Gather = Callable[[Tensor], Tensor]
"""Joins every rank's `[B, G, N]` to `[B, ranks · G, N]`, in rank order, on every rank."""


def plan_of_rank(plan: Plan, rank: int, ranks: int, gather: Gather) -> Plan:
    """The part of a model's plan that one rank runs: its heads' roles, and a selector that agrees with the others.

    `ranks` divides the KV heads.
    """
    if ranks == 1:
        return plan
    heads = len(plan.roles.layers[plan.roles.concerned[0]]) // ranks
    mine = slice(rank * heads, (rank + 1) * heads)
    selector = plan.selector
    if isinstance(selector, ScoredSelector) and selector.heads == "all":
        selector = GatheredSelector(selector.scorer, selector.rule, selector.heads, gather=gather)
    return Plan(selector, RoleMap(tuple(roles[mine] for roles in plan.roles.layers)), plan.notes, plan.guessed)


@dataclass(frozen=True, slots=True)
class GatheredSelector(ScoredSelector):
    """Cuts scores `[B, G, N]` of the heads of all ranks; N is the same on all of them, which hold the same rows."""

    gather: Gather = field(kw_only=True)

    def select(self, q: Tensor, kv: KVView, index: Index | None, scores: Tensor | None, scale: float) -> Selection:
        return self.rule.choose(self.gather(self.scorer.score(q, kv, index, scores)), kv.rows, self.scorer.unit, scale)
