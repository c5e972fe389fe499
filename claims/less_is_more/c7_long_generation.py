"""LessIsMore's attention recall stays above TidalDecode's as the generated text grows."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

OWN = Group("less_is_more:budget=256")


def _above(part: int, rival: str, *, decides: bool = True) -> Test:
    effect = f"attention recall in quarter {part}, less_is_more minus {rival}"
    return Test(effect, f"attention@{part}", OWN, Group(rival), decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 1a"),
    settings=Continuation(
        arms=(
            "less_is_more:budget=256",
            "tidal:budget=256,heads=query",
            "tidal:budget=256,heads=kv",
            "streaming:budget=256",
        ),
        decoded=4096,
        texts=12,
    ),
    tests=(
        *(_above(part, "tidal:budget=256,heads=query") for part in (1, 2, 3, 4)),
        _above(4, "tidal:budget=256,heads=kv", decides=False),
        _above(4, "streaming:budget=256", decides=False),
    ),
)
