"""Answers improve up to a budget of about 1,024 tokens and hardly beyond."""

from ..designs.questions import Questions
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

ARM = "lychee_cluster:form=paper,budget={}"


def _gain(larger: int, smaller: int, bound: float, *, saturated: bool = False, decides: bool = True) -> Test:
    effect = f"right answers, budget {larger:,} minus {smaller:,}"
    of, against = Group(ARM.format(larger)), Group(ARM.format(smaller))
    return Test(effect, "right", of, against, direction="below" if saturated else "above", bound=bound, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figure 7"),
    settings=Questions(arms=("dense", *map(ARM.format, (256, 512, 1024, 2048))), lengths=(8192, 8192)),
    tests=(_gain(1024, 256, 0.02), _gain(2048, 1024, 0.02, saturated=True), _gain(1024, 512, 0.02, decides=False)),
    premises=(Test("right answers of dense attention", "right", Group("dense"), bound=0.8),),
    instrument="a model that answers with dense attention",
    protocol="LongBench V2, whose questions are read, not looked up",
)
