"""Where selection is rare, one set for all heads keeps more recall in later layers than a set per head."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

FRAME, SINKS = "sinks=4,window=60", "sinks=4"
"""Arms that are compared keep the same first and last tokens: a quarter of 256, the sinks among them."""
UNION, WINDOW = "less_is_more:budget=256,reselect=,recent=0", "less_is_more:budget=256,reselect=,recent=0.25"
RARE_HEADS = "tidal:budget=256,heads=query,reselect=,"
ALWAYS = "composed:budget=256,rule=rank_union,sinks=4,recent=0.25,roles=select"
ALWAYS_HEADS = f"composed:budget=256,heads=query,{FRAME},roles=select"


def _more(effect: str, one: str, each: str, *, decides: bool = True) -> Test:
    return Test(f"attention recall, {effect}", "attention", Group(one), Group(each), decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 6"),
    settings=Continuation(
        arms=(UNION, WINDOW, RARE_HEADS + SINKS, RARE_HEADS + FRAME, ALWAYS, ALWAYS_HEADS),
        prompt=8192,
        decoded=256,
        kinds=("code", "prose"),
    ),
    tests=(
        _more("selection at layer 2 only, both with 4 sinks", UNION, RARE_HEADS + SINKS),
        _more("the same, both with 4 sinks and 60 recent tokens", WINDOW, RARE_HEADS + FRAME),
        _more("selection in every layer, both with 4 sinks and 60 recent tokens", ALWAYS, ALWAYS_HEADS, decides=False),
    ),
)
