"""TidalDecode has lower perplexity than Quest on long text, early and late."""

from ..designs.continuation import Continuation
from ..judging.claim import TIDAL, Claim, Group, Source, Test

NEAR, FAR = 8192, 30_000
BUDGETS = (2048, 4096)


def _lower(prompt: int, budget: int, other: str = "quest:budget={},heads={}", heads: str = "query") -> Test:
    of, against = (spec.format(budget, heads) for spec in ("tidal:budget={},heads={}", other))
    bound = 0.05 if other == "dense" else 0.0
    return Test(
        f"loss of the next token behind {prompt:,} tokens, {of} minus {against}",
        "loss",
        Group(f"behind {prompt}, {of}"),
        Group(f"behind {prompt}, {against}"),
        direction="below",
        bound=bound,
        decides=other != "dense" and heads == "query",
    )


CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "figure 4"),
    settings=Continuation(
        arms=(
            "dense",
            *(f"{name}:budget={budget},heads=query" for name in ("tidal", "quest") for budget in BUDGETS),
            *(f"{name}:budget={BUDGETS[0]},heads=kv" for name in ("tidal", "quest")),
        ),
        prompt=FAR,
        decoded=128,
        texts=12,
        kinds=("code", "prose"),
        nearer=(NEAR,),
    ),
    tests=(
        *(_lower(prompt, budget) for prompt in (NEAR, FAR) for budget in BUDGETS),
        *(_lower(prompt, BUDGETS[0], heads="kv") for prompt in (NEAR, FAR)),
        *(_lower(FAR, budget, "dense") for budget in BUDGETS),
    ),
)
