"""Steps retrieve much the same clusters one after the other, nearly all in 32 steps, also after thousands of tokens."""

from ..designs.indexing import Indexing
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

LAZY, OURS = "lazy_clusters:budget=512", "lychee_cluster:form=paper,budget=512"

QUARTERS = {1: "the first quarter", 2: "the second quarter", 3: "the third quarter", 4: "the last quarter"}


def _near(measure: str, what: str, arm: str, bound: float, reported: float | None = None, *, decides: bool) -> Test:
    return Test(f"{what}, {arm}", measure, Group(arm), bound=bound, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figure 9, appendix D"),
    settings=Indexing(arms=(LAZY, OURS), prompt=1024, decoded=4096, texts=8, window=32),
    tests=(
        # The paper calls the similarity high, and no more; random sets of the same sizes are drawn beside.
        *(
            _near(f"jaccard_above_random@{part}", f"Jaccard above random sets in {when}", arm, 0.2, decides=True)
            for arm in (LAZY, OURS)
            for part, when in QUARTERS.items()
        ),
        *(
            _near(f"hit@{part}", f"window hit rate in {when}", arm, 0.9, 1.0, decides=True)
            for arm in (LAZY, OURS)
            for part, when in QUARTERS.items()
        ),
        *(
            _near(f"{measure}@4", f"{what} in the last quarter", arm, 0.5, decides=False)
            for arm in (LAZY, OURS)
            for measure, what in (
                ("jaccard", "Jaccard similarity"),
                ("jaccard_of_random", "that of random sets"),
                ("hit_of_random", "their window hit rate"),
            )
        ),
    ),
)
