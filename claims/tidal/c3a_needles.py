"""At equal budget TidalDecode finds at least as many needles as Quest, and both far more than StreamingLLM."""

from ..designs.questions import Questions
from ..judging.claim import TIDAL, Claim, Group, Source, Test

BUDGETS = (32, 64, 128, 256, 512)
ARMS = ("tidal:budget={},heads=query", "quest:budget={},heads=query", "streaming:budget={}")
OURS = ("tidal:budget={},heads=kv", "quest:budget={},heads=kv")
TIDAL_QUERY, QUEST_QUERY, STREAMING, TIDAL_KV, QUEST_KV = (arm.format("*") for arm in (*ARMS, *OURS))

EFFECTS = (
    ("tidal minus quest, heads=query", TIDAL_QUERY, QUEST_QUERY, -0.02, 0.10, True),
    ("tidal minus streaming", TIDAL_QUERY, STREAMING, 0.2, 0.90, True),
    ("quest minus streaming", QUEST_QUERY, STREAMING, 0.2, 0.90, True),
    ("tidal minus quest, heads=kv", TIDAL_KV, QUEST_KV, -0.02, None, False),
)
"""Means over the five budgets: arms, bound, what the paper reports of Llama-3.1-8B at 10K (table 2) and LongChat (table
1), and whether it decides."""

CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "tables 1 and 2"),
    settings=Questions(
        arms=tuple(arm.format(budget) for arm in (*ARMS, *OURS) for budget in BUDGETS), texts=24, recall=True
    ),
    tests=tuple(
        Test(f"right answers, {of}", "right", Group(first), Group(second), bound=bound, reported=told, decides=decides)
        for of, first, second, bound, told, decides in EFFECTS
    ),
    protocol="one needle of 7 digits, its question inside the dense prompt: easier than ours, decoded sparsely",
)
