"""A quarter of heads that retrieve answers as well as a half, at the two larger budgets."""

from ..designs.retrieving import Retrieving
from ..designs.trial import STANDS
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

BUDGETS = (64, 128, 256)
"""A sixteenth of the paper's 1,024, 2,048 and 4,096, as texts of 4,096 tokens are of 64K."""
QUARTER, HALF = 12, 24
"""Of the bundled model's 48 KV heads, the best by the gates that were trained for 16."""


def _no_worse(budgets: str, gates: str, *, decides: bool = False) -> Test:
    effect = f"right answers, a quarter minus a half of {gates} heads, budget {budgets}"
    of, against = (Group(f"{gates} {count}, seed *, budget {budgets}") for count in (QUARTER, HALF))
    return Test(effect, "right", of, against, bound=-0.02, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "figure 8"),
    settings=Retrieving("gates.json", counts=(QUARTER, HALF), budgets=BUDGETS),
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
)
