"""LessIsMore does not lengthen what is generated, while TidalDecode and Quest do."""

from ..designs.generation import Generation
from ..judging.claim import LESS_IS_MORE, Claim, Direction, Group, Source, Test

BUDGETS = (64, 128, 256)
ARMS = ("less_is_more:budget={}", "tidal:budget={},heads=query", "quest:budget={},heads=query", "streaming:budget={}")
OWN, TIDAL_QUERY, QUEST_QUERY, STREAMING = (arm.format("*") for arm in ARMS)


def _longer(
    arm: str,
    reported: float | None = None,
    *,
    direction: Direction = "above",
    measure: str = "tokens",
    until: str = "the end of sequence",
    decides: bool = True,
) -> Test:
    effect, of, dense = f"tokens until {until}, {arm} over dense", Group(arm), Group("dense")
    return Test(effect, measure, of, dense, "ratio", direction, bound=1.1, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "table 13, section A.5.2"),
    settings=Generation(arms=("dense", *(arm.format(budget) for arm in ARMS for budget in BUDGETS))),
    tests=(
        # Means over the paper's three budgets, against 14.8 thousand tokens.
        _longer(OWN, 1.03, direction="below"),
        _longer(TIDAL_QUERY, 1.13),
        _longer(QUEST_QUERY, 1.63),
        _longer(STREAMING, decides=False),
        *(
            _longer(arm, measure="answer", until="the end of the answer's sentence", decides=False)
            for arm in (OWN, TIDAL_QUERY, QUEST_QUERY, STREAMING)
        ),
    ),
    premises=(
        Test("share of dense answers that the model ends itself", "ended", Group("dense"), bound=0.8),
        Test("right answers of dense attention", "right", Group("dense"), bound=0.8),
    ),
    instrument="a model that reasons before it answers, and then ends",
)
