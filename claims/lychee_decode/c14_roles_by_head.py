"""With as many dense heads, roles of single heads keep more answers than sharing by whole layers."""

from ..designs.retrieving import Retrieving
from ..designs.trial import STANDS
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

BUDGETS = (16, 64, 256)
"""Of texts of 4,096 tokens, where the paper has 1,024 and 4,096 of longer ones: the bundled model loses answers only
at small budgets."""
TIDAL = "tidal:budget={},heads={}"


def _above(budget: str, gates: str, heads: str, reported: float | None = None, *, decides: bool = False) -> Test:
    """Roles of 16 heads against two dense, two choosing layers of four heads."""
    told = "all budgets" if budget == "*" else f"budget {budget}"
    effect = f"right answers, {gates} roles minus tidal with heads={heads}, {told}"
    of, against = Group(f"{gates} 16, seed *, budget {budget}"), Group(TIDAL.format(budget, heads) + "*")
    return Test(effect, "right", of, against, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "table 1"),
    settings=Retrieving(
        "gates.json",
        counts=(16,),
        budgets=BUDGETS,
        others=tuple(TIDAL.format(budget, heads) for heads in ("query", "kv") for budget in BUDGETS),
    ),
    tests=(
        # Averages of Qwen3-8B: 32.38 against 29.70, and 33.48 against 31.76; of Llama-3-8B 0.3 and 0.2 points.
        _above("*", "hardkuma", "query", reported=0.012, decides=True),
        *(_above(str(budget), "hardkuma", "query") for budget in BUDGETS),
        _above("*", "hardkuma", "kv"),
        # By the paper's own multiplier, where another one stands for it.
        _above("*", "letter", "query"),
        _above("*", "letter", "kv"),
        _above("*", "direct", "query"),
        _above("*", "direct", "kv"),
    ),
    premises=(STANDS,),
    instrument="gates trained by the authors' code, a model whose retrieval rests on more than one layer",
)
