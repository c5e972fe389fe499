"""Where selection is rare, one set for all heads keeps more recall in later layers than a random head's set."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

RARE, UNION = "less_is_more:budget=256,reselect=", "less_is_more:budget=256,reselect=,recent=0"
RARE_RANDOM, RARE_HEADS = "random_head:budget=256,roles=layers:2", "tidal:budget=256,heads=query,reselect="
ALWAYS = "composed:budget=256,rule=rank_union,roles=select"
ALWAYS_RANDOM = "random_head:budget=256,roles=select"


def _more(arm: str, random: str, effect: str, *, decides: bool = False) -> Test:
    return Test(f"attention recall, {effect}", "attention", Group(arm), Group(random), decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 6, section A.5.1"),
    settings=Continuation(arms=(RARE, UNION, RARE_RANDOM, RARE_HEADS, ALWAYS, ALWAYS_RANDOM)),
    tests=(
        # Without a recent window, which would explain much by itself (C8).
        _more(UNION, RARE_RANDOM, "selection at layer 2 only, minus a random head's set for its group", decides=True),
        _more(RARE, RARE_RANDOM, "the same, one set with a recent window"),
        _more(RARE_HEADS, RARE_RANDOM, "a set per head minus a random head's, layer 2 only"),
        # The paper calls the random head competitive here.
        _more(ALWAYS, ALWAYS_RANDOM, "selection in every layer, minus a random head's set for its group"),
    ),
)
