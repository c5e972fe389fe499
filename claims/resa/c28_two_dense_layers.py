"""Two dense layers do not rescue block-sparse decoding."""

from ..designs.questions import Questions
from ..judging.claim import RESA, Claim, Group, Source, Test

SPARSE, RESCUED = "resa:rectify=none", "resa:rectify=none,dense_layers=2"

CLAIM = Claim(
    says=__doc__,
    source=Source(RESA, "table 1"),
    settings=Questions(arms=("dense", SPARSE, RESCUED)),
    tests=(
        Test(
            "right answers, two dense layers minus dense",
            "right",
            Group(RESCUED),
            Group("dense"),
            direction="below",
            bound=-0.02,
            reported=-0.033,
        ),
        Test(
            "right answers, two dense layers minus none",
            "right",
            Group(RESCUED),
            Group(SPARSE),
            reported=-0.003,
            decides=False,
        ),
    ),
    premises=(
        Test(
            "right answers, block-sparse minus dense",
            "right",
            Group(SPARSE),
            Group("dense"),
            direction="below",
            bound=-0.02,
            reported=-0.030,
        ),
    ),
    instrument="a model on which block-sparse decoding loses answers",
)
