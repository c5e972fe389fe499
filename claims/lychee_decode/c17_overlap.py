"""Heads differ widely in how many of their best tokens are those of the same head in the next layer."""

from ..designs.overlap import Overlap
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

HEADS = "layer *, head *"

CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figures 1, 10 to 13"),
    settings=Overlap(),
    tests=(
        # Figure 1: 0% of head 14 and 100% of head 24 in the last two layers.
        Test(
            "overlap of the best five tokens, the head with most minus that with least",
            "overlap",
            Group(HEADS, "best"),
            Group(HEADS, "worst"),
            bound=0.5,
            reported=1.0,
        ),
    ),
    instrument="a model with more heads",
)
