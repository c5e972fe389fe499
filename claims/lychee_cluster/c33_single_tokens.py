"""Clusters of single tokens answer more than Quest's pages, at as many tokens and as many bytes of scores."""

from ..designs.questions import Questions
from ..judging.claim import SACCADE, Claim, Group, Source, Test

BUDGETS = (256, 1024)
HALF = "token_clusters:cluster_size=16"
"""Half of the bytes that Quest's bounds are."""
SPECS = ("quest", "token_clusters", HALF, "lychee_cluster")


def _more(spec: str, budget: int, *, bound: float = 0.0, decides: bool = False) -> Test:
    of, against = Group(_arm(spec, budget)), Group(_arm("quest", budget))
    effect = f"right answers, {spec} minus quest, budget {budget:,}"
    return Test(effect, "right", of, against, bound=bound, decides=decides)


def _arm(spec: str, budget: int) -> str:
    return f"{spec}{',' if ':' in spec else ':'}budget={budget}"


CLAIM = Claim(
    says=__doc__,
    source=Source(SACCADE, "token_clusters"),
    settings=Questions(
        arms=("dense", *(_arm(spec, budget) for spec in SPECS for budget in BUDGETS)),
        lengths=(7680, 7680),
        texts=20,
        seed=33,
    ),
    tests=(
        *(_more("token_clusters", budget, decides=True) for budget in BUDGETS),
        *(_more(HALF, budget) for budget in BUDGETS),
        # 6 of 96 questions.
        _more("lychee_cluster", 1024, bound=-0.0625),
    ),
    premises=(Test("right answers of dense attention", "right", Group("dense"), bound=0.5),),
    instrument="a model that answers with dense attention, and loses some under Quest",
)
