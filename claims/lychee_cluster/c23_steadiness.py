"""Steps retrieve much the same clusters one after the other, nearly all in 32 steps, also after thousands of tokens."""

from ..designs.indexing import Indexing
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

LAZY, OURS = "lazy_clusters:budget=512", "lychee_cluster:budget=512"

SEEN = tuple(
    (part, when, arm) for arm in (LAZY, OURS) for part, when in ((1, "the first quarter"), (4, "the last quarter"))
)


def _near(measure: str, what: str, arm: str, bound: float, reported: float | None, *, decides: bool) -> Test:
    return Test(f"{what}, {arm}", measure, Group(arm), bound=bound, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figure 9, appendix D"),
    settings=Indexing(arms=(LAZY, OURS), prompt=1024, decoded=4096, texts=8, window=32),
    tests=(
        # The paper calls it high, and no more; of random sets of this size it would be below 0.2.
        *(
            _near(f"jaccard@{part}", f"Jaccard similarity in {when}", arm, 0.5, None, decides=True)
            for part, when, arm in SEEN
        ),
        # Random sets of this size would reach as much.
        _near("hit@1", "window hit rate in the first quarter", LAZY, 0.9, 1.0, decides=False),
        _near("hit@4", "window hit rate in the last quarter", LAZY, 0.9, 1.0, decides=False),
    ),
)
