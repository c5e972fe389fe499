"""The search for TidalDecode's re-selection layer finds LessIsMore's too."""

from ..designs.questions import Questions
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

OWN, TIDALS = "less_is_more:budget=64,reselect=", "tidal:budget=64,heads={},reselect="
BEST, MEDIAN = (Group(f"{OWN}*", how) for how in ("best", "median"))


def _same(heads: str, reported: float | None = None, *, decides: bool = True) -> Test:
    effect = f"right answers of less_is_more at tidal's best layer minus at its own, heads={heads}"
    by = Group(f"{OWN}*", "best", by=f"{TIDALS.format(heads)}*")
    return Test(effect, "right", by, BEST, bound=-0.05, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "table 12, section A.4"),
    settings=Questions(tuple(f"{arm}{{layer}}" for arm in (OWN, TIDALS.format("query"), TIDALS.format("kv")))),
    tests=(_same("query", reported=0.0), _same("kv", decides=False)),
    premises=(
        Test(
            "right answers of less_is_more at its best layer minus at the median one", "right", BEST, MEDIAN, bound=0.1
        ),
    ),
    instrument="a model on which the layer matters to less_is_more",
)
