"""Where selection is rare, one set for all heads keeps more recall in later layers than a set per head."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

UNION, WINDOW = "less_is_more:budget=256,reselect=,recent=0", "less_is_more:budget=256,reselect="
RARE_HEADS = "tidal:budget=256,heads=query,reselect="
ALWAYS = "composed:budget=256,rule=rank_union,roles=select"
ALWAYS_HEADS = "composed:budget=256,heads=query,roles=select"

CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 6"),
    settings=Continuation(arms=(UNION, WINDOW, RARE_HEADS, ALWAYS, ALWAYS_HEADS)),
    tests=(
        Test("attention recall, selection at layer 2 only", "attention", Group(UNION), Group(RARE_HEADS)),
        Test("the same, one set with a recent window", "attention", Group(WINDOW), Group(RARE_HEADS), decides=False),
        Test(
            "attention recall, selection in every layer", "attention", Group(ALWAYS), Group(ALWAYS_HEADS), decides=False
        ),
    ),
)
