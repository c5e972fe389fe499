"""Heads of one layer differ widely in how many of their best tokens are those of the same head in the next layer."""

from ..designs.overlap import Overlap
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

LAYERS = "layer *"

CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figures 1, 10 to 13"),
    settings=Overlap(),
    tests=(
        # Figure 1: 0% of head 14 and 100% of head 24 in the last two layers.
        Test(
            "overlap of the best five tokens, a layer's head with most minus that with least, where they differ most",
            "range",
            Group(LAYERS, "best"),
            bound=0.5,
            reported=1.0,
        ),
        Test("the same in the median layer", "range", Group(LAYERS, "median"), bound=0.5, decides=False),
    ),
    instrument="a model with more heads",
)
