"""Clusters of single tokens answer more than Quest's pages at the same budget."""

from ..designs.questions import Questions
from ..judging.claim import SACCADE, Claim, Group, Source, Test

BUDGETS = (256, 1024)
TOKENS, HALF, BARE = "token_clusters", "token_clusters:cluster_size=16", "token_clusters:sinks=0"
"""The default; with half of its index, which is then about half of Quest's; without sinks, as Quest is."""
SPECS = ("quest", TOKENS, HALF, BARE, "exact_topk")


def _arm(spec: str, budget: int) -> str:
    return f"{spec}{',' if ':' in spec else ':'}budget={budget}"


def _more(spec: str, budget: int, *, decides: bool = False) -> Test:
    of, against = Group(_arm(spec, budget)), Group(_arm("quest", budget))
    effect = f"right answers, {spec} minus quest, budget {budget:,}"
    return Test(effect, "right", of, against, bound=0.0, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(SACCADE, "token_clusters"),
    settings=Questions(
        arms=("dense", *(_arm(spec, budget) for spec in SPECS for budget in BUDGETS)),
        lengths=(7680, 7680),
        texts=20,
        seed=33,
    ),
    # Known before: the bundled model, and other texts under Qwen2.5-Coder, which both answered so.
    tests=tuple(_more(spec, budget, decides=spec == TOKENS) for spec in (TOKENS, HALF, BARE) for budget in BUDGETS),
    premises=(
        Test("right answers of dense attention", "right", Group("dense"), bound=0.5),
        Test(
            "right answers, dense minus quest, budget 256",
            "right",
            Group("dense"),
            Group(_arm("quest", 256)),
            bound=0.1,
        ),
    ),
    instrument="a model that answers with dense attention and loses answers under Quest",
)
