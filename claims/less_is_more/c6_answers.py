"""LessIsMore answers better than TidalDecode, Quest and StreamingLLM at every budget, and reaches dense earlier."""

from ..designs.questions import Questions
from ..judging.claim import LESS_IS_MORE, Claim, Group, Source, Test

BUDGETS = (32, 64, 128, 256, 512)
RIVALS = ("tidal:budget={},heads=query", "quest:budget={},heads=query", "streaming:budget={}")
OURS = ("tidal:budget={},heads=kv", "quest:budget={},heads=kv")


def _above(budget: str, rival: str, bound: float = 0.0, *, decides: bool = True) -> Test:
    effect = f"right answers, less_is_more minus {rival.format(budget)}"
    own = Group(f"less_is_more:budget={budget}")
    return Test(effect, "right", own, Group(rival.format(budget)), bound=bound, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 4, tables 1, 2 and 6"),
    settings=Questions(
        arms=tuple(
            arm.format(budget) for arm in ("dense", "less_is_more:budget={}", *RIVALS, *OURS) for budget in BUDGETS
        )
    ),
    tests=(
        *(_above("*", rival) for rival in RIVALS),
        # At no budget below the best rival of the paper.
        *(_above(str(budget), RIVALS[0], bound=-0.02) for budget in BUDGETS),
        Test(
            "right answers, less_is_more with 128 tokens minus dense",
            "right",
            Group("less_is_more:budget=128"),
            Group("dense"),
            bound=-0.05,
            reported=0.0,
        ),
        *(_above("*", rival, decides=False) for rival in OURS),
    ),
    premises=(Test("right answers of dense attention", "right", Group("dense"), bound=0.8),),
    instrument="a model that answers with dense attention",
    protocol="mathematics and science problems and, in table 6, one needle asked in the dense prompt",
)
