"""LessIsMore's attention recall stays above TidalDecode's as the generated text grows."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

OWN = Group("less_is_more:budget=256")
PUBLISHED = "tidal:budget=256,heads=query"
FRAMED = f"{PUBLISHED},sinks=4,window=60"
"""With LessIsMore's sinks and recent window: what is left is one set or one per head."""


def _above(part: int, rival: str, *, decides: bool = True) -> Test:
    effect = f"attention recall in quarter {part}, less_is_more minus {rival}"
    return Test(effect, f"attention@{part}", OWN, Group(rival), decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 1a"),
    settings=Continuation(
        arms=("less_is_more:budget=256", PUBLISHED, FRAMED, "streaming:budget=256,dense_layers=2"),
        decoded=2048,
        texts=8,
        kinds=("code", "prose"),
        own=0.7,
    ),
    tests=(
        *(_above(part, FRAMED) for part in (1, 2, 3, 4)),
        *(_above(part, PUBLISHED, decides=False) for part in (1, 2, 3, 4)),
        _above(4, "streaming:budget=256,dense_layers=2", decides=False),
    ),
    protocol="long answers of reasoning models",
)
