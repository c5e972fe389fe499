"""Where selection is rare, one set for all heads keeps more recall in later layers than a random head's set."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test
from .c9_transfer import ALWAYS, FRAME, RARE_HEADS, SINKS, UNION, WINDOW

RANDOM = "random_head:budget=256,roles=layers:2,"
ALWAYS_RANDOM = f"random_head:budget=256,roles=select,{FRAME}"


def _more(arm: str, random: str, effect: str, *, decides: bool = False) -> Test:
    return Test(f"attention recall, {effect}", "attention", Group(arm), Group(random), decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 6, section A.5.1"),
    settings=Continuation(
        arms=(UNION, WINDOW, RANDOM + SINKS, RANDOM + FRAME, RARE_HEADS + SINKS, ALWAYS, ALWAYS_RANDOM),
        prompt=8192,
        decoded=256,
        kinds=("code", "prose"),
    ),
    tests=(
        # Without a recent window, which would explain much by itself (C8).
        _more(UNION, RANDOM + SINKS, "selection at layer 2 only, minus a random head's set, 4 sinks", decides=True),
        _more(WINDOW, RANDOM + FRAME, "the same, both with a recent window too"),
        _more(RARE_HEADS + SINKS, RANDOM + SINKS, "a set per head minus a random head's, layer 2 only, 4 sinks"),
        # The paper calls the random head competitive here.
        _more(ALWAYS, ALWAYS_RANDOM, "selection in every layer, minus a random head's set, 4 sinks and a window"),
    ),
)
