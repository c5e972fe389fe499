"""Layers whose heads have different roles, the plans of these, and what the oracle says of them."""

from methods.harness import Decoder
from methods.layouts import Batch
from methods.oracles import Sets
from methods.oracles_composed import composed, top_k
from saccade.plans.plan import Plan
from saccade.plans.roles import RoleMap
from saccade.selection.rules import TopK
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.scorers.page_bounds import PageBoundScorer
from saccade.selection.selector import ScoredSelector
from saccade.types import HeadGrouping, Pooling, Role

PAGE = 4


def role_map(roles: list[list[str]]) -> RoleMap:
    return RoleMap(tuple(tuple(Role(role) for role in layer) for layer in roles))


def decoder_of(roles: list[list[str]], scorer: str, pooling: Pooling, budget: int, *, shortcut: bool = True) -> Decoder:
    """A plan of these roles; "each" pooling is one set per query head, all others one per KV head."""
    unit = PageBoundScorer(PAGE, pooling) if scorer == "page_bounds" else ExactScorer(pooling)
    heads: HeadGrouping = "query" if pooling == "each" else "kv"
    return Decoder(Plan(ScoredSelector(unit, TopK(budget), heads), role_map(roles)), shortcut=shortcut)


def expected(batch: Batch, roles: list[list[str]], scorer: str, pooling: Pooling, budget: int) -> list[Sets]:
    """What the oracle says of every row."""
    shared = {"rule": top_k(budget), "scorer": scorer, "pooling": pooling, "page": 1 if scorer == "exact" else PAGE}
    heads = "query" if pooling == "each" else "kv"
    return [composed(q, k, roles=roles, heads=heads, **shared).sets for q, k in zip(batch.q, batch.k, strict=True)]


MIXTURES = {
    "dense and publish, nobody reuses": [
        ["dense", "publish", "dense", "publish"],
        ["publish", "dense", "dense", "dense"],
    ],
    "publish and reuse": [
        ["publish"] * 4,
        ["publish", "reuse", "reuse", "publish"],
        ["reuse", "publish", "reuse", "reuse"],
    ],
    "select, publish and reuse": [
        ["select", "publish", "select", "publish"],
        ["select", "publish", "reuse", "reuse"],
        ["reuse", "select", "reuse", "publish"],
    ],
    "select and dense": [["select", "dense", "dense", "select"], ["reuse", "select", "dense", "select"]],
    "all four": [["publish", "select", "publish", "dense"], ["reuse", "select", "publish", "dense"]],
    "one head attends to all, scattered": [
        ["publish"] * 8,
        ["reuse", "publish", "reuse", "publish", "reuse", "reuse", "dense", "reuse"],
        ["publish", "reuse", "reuse", "reuse", "reuse", "reuse", "reuse", "publish"],
    ],
    "heads refresh at different layers": [
        ["publish", "dense", "dense", "publish"],
        ["reuse", "publish", "dense", "reuse"],
        ["reuse", "reuse", "select", "publish"],
        ["dense", "reuse", "reuse", "reuse"],
    ],
}
