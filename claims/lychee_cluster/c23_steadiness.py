"""Nearly all clusters that a step retrieves were retrieved in the 32 steps before, also after thousands of tokens."""

from ..designs.indexing import Indexing
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

LAZY, OURS = "lychee_cluster:budget=512,replant=none", "lychee_cluster:budget=512"


def _near(measure: str, what: str, arm: str, bound: float, reported: float | None, *, decides: bool) -> Test:
    return Test(f"{what}, {arm}", measure, Group(arm), bound=bound, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figure 9, appendix D"),
    settings=Indexing(arms=(LAZY, OURS), prompt=1024, decoded=4096, texts=8, window=32),
    tests=(
        _near("hit@1", "window hit rate in the first quarter", LAZY, 0.9, 1.0, decides=True),
        _near("hit@4", "window hit rate in the last quarter", LAZY, 0.9, 1.0, decides=True),
        _near("hit@4", "window hit rate in the last quarter", OURS, 0.9, None, decides=False),
        # The paper calls it high, and no more.
        _near("jaccard@4", "Jaccard similarity in the last quarter", LAZY, 0.5, None, decides=False),
    ),
)
