"""Building the index takes at most 15% of the prefill, and keeping it up less than 1% of decoding."""

from ..designs.indexing import Indexing
from ..judging.claim import LYCHEE_CLUSTER, Claim, Group, Source, Test

LAZY, OURS = "lazy_clusters:budget=1024", "lychee_cluster:form=paper,budget=1024"


def _below(measure: str, what: str, arm: str, bound: float, *, decides: bool = True) -> Test:
    effect = f"{what}, {arm}"
    return Test(effect, measure, Group(arm), direction="below", bound=bound, reported=bound, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_CLUSTER, "figure 5, section 5.3"),
    # Two full buffers of 128 tokens are taken in.
    settings=Indexing(arms=(LAZY, OURS), prompt=4096, decoded=256, texts=8),
    tests=(
        _below("build", "the index's part of the prefill", LAZY, 0.15),
        _below("update", "the index's part of decoding", LAZY, 0.01),
        _below("build", "the index's part of the prefill", OURS, 0.15, decides=False),
        _below("update", "the index's part of decoding", OURS, 0.01, decides=False),
    ),
)
