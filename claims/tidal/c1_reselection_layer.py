"""Accuracy depends sharply on the layer that selects again."""

from ..designs.questions import Questions
from ..judging.claim import TIDAL, Claim, Group, Source, Test


def _apart(budget: int, heads: str, reported: float | None = None, *, decides: bool = True) -> Test:
    """The best layer, found on other texts, against the layer in the middle of their ranking."""
    arms = f"tidal:budget={budget},heads={heads},reselect=*"
    effect = f"right answers at the best layer minus at the median one, budget {budget}, heads={heads}"
    best, median = Group(arms, "best"), Group(arms, "median")
    return Test(effect, "right", best, median, bound=0.2, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "figure 7, tables 9–14"),
    settings=Questions(
        arms=(
            "tidal:budget=64,heads=query,reselect={layer}",
            "tidal:budget=256,heads=query,reselect={layer}",
            "tidal:budget=64,heads=kv,reselect={layer}",
        )
    ),
    tests=(
        # Table 10: 100% at layer 13; layers 15 to 31 and 2 to 12 lie around 46% and 66%.
        _apart(64, "query", reported=0.54),
        _apart(256, "query", reported=0.34),
        _apart(64, "kv", decides=False),
    ),
    premises=(
        Test("right answers at the best layer, budget 256", "right", Group("tidal:budget=256,*", "best"), bound=0.5),
    ),
    instrument="a model that finds facts under tidal at some layer",
    protocol="one needle of 7 digits, its question inside the dense prompt: easier than ours, decoded sparsely",
)
