"""The search for TidalDecode's re-selection layer finds LessIsMore's too."""

from ..designs.questions import Questions
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

OWN, TIDALS = "less_is_more:budget=64,reselect=*", "tidal:budget=64,heads=query,reselect=*"
TIDALS_KV = TIDALS.replace("query", "kv")

CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "table 12, section A.4"),
    settings=Questions(
        arms=(
            "less_is_more:budget=64,reselect={layer}",
            "tidal:budget=64,heads=query,reselect={layer}",
            "tidal:budget=64,heads=kv,reselect={layer}",
        ),
    ),
    tests=(
        Test(
            "right answers of less_is_more at tidal's best layer minus at its own, heads=query",
            "right",
            Group(OWN, "best", by=TIDALS),
            Group(OWN, "best"),
            bound=-0.05,
            reported=0.0,
        ),
        Test(
            "right answers of less_is_more at tidal's best layer minus at its own, heads=kv",
            "right",
            Group(OWN, "best", by=TIDALS_KV),
            Group(OWN, "best"),
            bound=-0.05,
            decides=False,
        ),
    ),
    premises=(
        Test(
            "right answers of less_is_more at its best layer minus at the median one",
            "right",
            Group(OWN, "best"),
            Group(OWN, "median"),
            bound=0.1,
        ),
    ),
    instrument="a model on which the layer matters to less_is_more",
)
