"""LessIsMore does not lengthen what is generated, while TidalDecode and Quest do."""

from ..designs.generation import Generation
from ..designs.measured import MeasuredTexts
from ..judging.claim import LESS_IS_MORE, Claim, Direction, Group, Source, Test
from ..reasoning.command import BUDGETS as BUDGETS_TOLD
from ..reasoning.command import POLICIES, SEED
from ..reasoning.job import RULES

BUDGETS = (64, 128, 256)
ARMS = ("less_is_more:budget={}", "tidal:budget={},heads=query", "quest:budget={},heads=query", "streaming:budget={}")
OWN, TIDAL_QUERY, QUEST_QUERY, STREAMING = (arm.format("*") for arm in ARMS)
FILE = "reasoning_h200.json"
COMMAND = f"python -m claims reasoning --model models/qwen2.5-coder-1.5b --json docs/results/{FILE}"
STOCK, PUBLISHED = "stock", ("less_is_more:*", "tidal:*", "quest:*")
"""In vLLM: problems that dense attention answers rightly and at length, greedily and drawn."""


def _longer(
    arm: str, reported: float | None = None, *, direction: Direction = "above", measure: str = "tokens",
    until: str = "the end of sequence", decides: bool = True, dense: str = "dense",
) -> Test:  # fmt: skip
    effect = f"tokens until {until}, {arm} over dense"
    groups = Group(arm), Group(dense)
    return Test(effect, measure, *groups, "ratio", direction, bound=1.1, reported=reported, decides=decides)


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
    protocol="mathematics of competitions, answers of 14.8 thousand tokens",
).elsewhere(
    settings=MeasuredTexts(FILE, COMMAND, "reasoning", (*RULES, POLICIES, BUDGETS_TOLD, SEED)),
    tests=(
        _longer(PUBLISHED[0], 1.03, direction="below", dense=STOCK),
        *(_longer(arm, told, dense=STOCK) for arm, told in zip(PUBLISHED[1:], (1.13, 1.63), strict=True)),
        *(
            Test(f"{what}, {arm} minus dense", measure, Group(arm), Group(STOCK), decides=False)
            for measure, what in (("ended", "answers that end"), ("right", "right answers"))
            for arm in PUBLISHED
        ),
    ),
    premises=(
        Test("whether 100 problems are answered rightly and at length", "ended@enough", Group(STOCK), bound=0.5),
    ),
)
