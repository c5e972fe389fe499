"""Two dense layers do not rescue block-sparse decoding."""

from ..designs.questions import Questions
from ..judging.claim import RESA, Claim, Group, Source, Test

SPARSE, RESCUED = "resa:rectify=none", "resa:rectify=none,dense_layers=2"


def _less(what: str, of: str, *, reported: float) -> Test:
    effect = f"right answers, {what} minus dense"
    return Test(effect, "right", Group(of), Group("dense"), direction="below", bound=-0.02, reported=reported)


CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "table 1"),
    settings=Questions(arms=("dense", SPARSE, RESCUED)),
    tests=(
        _less("two dense layers", RESCUED, reported=-0.033),
        Test(
            "right answers, two dense layers minus none",
            "right",
            Group(RESCUED),
            Group(SPARSE),
            reported=-0.003,
            decides=False,
        ),
    ),
    premises=(_less("block-sparse", SPARSE, reported=-0.030),),
    instrument="a model on which block-sparse decoding loses answers",
    protocol="mathematics in long generations",
)
