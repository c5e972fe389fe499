"""At equal budget TidalDecode finds at least as many needles as Quest, and both far more than StreamingLLM."""

from ..designs.questions import Questions
from ..judging.claim import TIDAL, Claim, Group, Source, Test

BUDGETS = (32, 64, 128, 256, 512)
ARMS = ("tidal:budget={},heads=query", "quest:budget={},heads=query", "streaming:budget={}")
OURS = ("tidal:budget={},heads=kv", "quest:budget={},heads=kv")
TIDAL_QUERY, QUEST_QUERY, STREAMING, TIDAL_KV, QUEST_KV = (arm.format("*") for arm in (*ARMS, *OURS))

CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "tables 1 and 2"),
    settings=Questions(
        arms=tuple(arm.format(budget) for arm in (*ARMS, *OURS) for budget in BUDGETS), texts=24, recall=True
    ),
    tests=(
        # Means over the five budgets; of Tidal's table 2 Llama-3.1-8B at 10K, of table 1 LongChat.
        Test(
            "right answers, tidal minus quest, heads=query",
            "right",
            Group(TIDAL_QUERY),
            Group(QUEST_QUERY),
            bound=-0.02,
            reported=0.10,
        ),
        Test(
            "right answers, tidal minus streaming",
            "right",
            Group(TIDAL_QUERY),
            Group(STREAMING),
            bound=0.2,
            reported=0.90,
        ),
        Test(
            "right answers, quest minus streaming",
            "right",
            Group(QUEST_QUERY),
            Group(STREAMING),
            bound=0.2,
            reported=0.90,
        ),
        Test(
            "right answers, tidal minus quest, heads=kv",
            "right",
            Group(TIDAL_KV),
            Group(QUEST_KV),
            bound=-0.02,
            decides=False,
        ),
    ),
)
