"""A quarter of heads that retrieve answers as well as a half, at the two larger budgets."""

from ..designs.retrieving import Retrieving
from ..designs.trial import FILE, PUBLISHED_FILE, PUBLISHED_STANDS, STANDS
from ..gates.choice import PUBLISHED
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

BUDGETS = (64, 128, 256)
"""A sixteenth of the paper's 1,024, 2,048 and 4,096, as texts of 4,096 tokens are of 64K."""
QUARTER, HALF = 12, 24
"""Of the bundled model's 48 KV heads, the best by the gates that were trained for 16."""


PUBLISHED_COUNTS, PUBLISHED_BUDGETS = ("1/4", "1/2"), (256, 1024)


def _no_worse(budgets: str, gates: str, *, decides: bool = False, published: bool = False) -> Test:
    """What 480 questions of a published model can tell is no smaller than a twentieth."""
    effect = f"right answers, a quarter minus a half of {gates} heads, budget {budgets}"
    counts, bound = (PUBLISHED_COUNTS, -0.05) if published else ((QUARTER, HALF), -0.02)
    of, against = (Group(f"{gates} {count}, seed *, budget {budgets}") for count in counts)
    return Test(effect, "right", of, against, bound=bound, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figure 8"),
    settings=Retrieving(FILE, counts=(QUARTER, HALF), budgets=BUDGETS),
    tests=(
        _no_worse("128", "hardkuma", decides=True),
        _no_worse("256", "hardkuma", decides=True),
        _no_worse("64", "hardkuma"),
        # By the paper's own multiplier, where another one stands for it.
        _no_worse("128", "letter"),
        _no_worse("256", "letter"),
        _no_worse("128", "direct"),
        _no_worse("256", "direct"),
    ),
    premises=(STANDS,),
    instrument="gates trained by the authors' code, a model with heads that are not needed",
).elsewhere(
    settings=Retrieving(PUBLISHED_FILE, PUBLISHED_COUNTS, PUBLISHED_BUDGETS, texts=40, choice=PUBLISHED),
    tests=tuple(
        _no_worse(str(budget), gates, decides=gates == "hardkuma", published=True)
        for gates in ("hardkuma", "direct")
        for budget in PUBLISHED_BUDGETS
    ),
    premises=(PUBLISHED_STANDS,),
    instrument="more texts",
)
