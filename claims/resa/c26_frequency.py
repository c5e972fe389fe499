"""Rectifying every 32 steps is close to the upper bound, and every 128 keeps most of the gain."""

from ..designs.accumulated import Accumulated
from ..judging.claim import RESA, Claim, Group, Source, Test

UPPER, SPARSE, OFTEN, RARELY = (
    f"0.1, {setting}" for setting in ("decode-only", "sparse-only", "every 32", "every 128")
)

CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "figure 4"),
    settings=Accumulated(
        policy="resa:min_pages=1", kept=(0.1,), every=(32, 128), lengths=(4096,), passages=16, sparse_only=True
    ),
    tests=(
        Test("accuracy, every 32 minus the upper bound", "right", Group(OFTEN), Group(UPPER), bound=-0.02),
        Test(
            "points lost to dense, every 128 over those without rectification",
            "gap",
            Group(RARELY),
            Group(SPARSE),
            kind="ratio",
            direction="below",
            bound=0.5,
        ),
    ),
    premises=(Test("accuracy, upper bound minus sparse-only", "right", Group(UPPER), Group(SPARSE)),),
    instrument="a model on which sparse decoding from the first token on loses something",
)
