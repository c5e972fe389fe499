"""With as many dense heads, roles of single heads keep more answers than sharing by whole layers."""

from ..designs.retrieving import Retrieving
from ..designs.trial import FILE, PUBLISHED_FILE, PUBLISHED_STANDS, STANDS
from ..gates.choice import FOUR_LAYERS, PUBLISHED
from ..judging.claim import LYCHEE_DECODE, Claim, Group, Source, Test

BUDGETS, PUBLISHED_BUDGETS = (16, 64, 256), (64, 256, 1024)
"""Of texts of 4,096 tokens, where the paper has 1,024 and 4,096 of longer ones: the bundled model loses answers only
at small budgets, published ones at the paper's smaller one too."""
TIDAL = "tidal:budget={},heads={}"


def _above(budget: str, gates: str, heads: str, reported: float | None = None, *, decides: bool = False) -> Test:
    """Roles of 16 heads, or as many as told behind the gates, against two dense, two choosing layers."""
    told = "all budgets" if budget == "*" else f"budget {budget}"
    kind, _, count = gates.partition(" ")
    effect = f"right answers, {kind} roles minus tidal with heads={heads}, {told}"
    of, against = Group(f"{kind} {count or 16}, seed *, budget {budget}"), Group(TIDAL.format(budget, heads) + "*")
    return Test(effect, "right", of, against, reported=reported, decides=decides)


def _others(budgets: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(TIDAL.format(budget, heads) for heads in ("query", "kv") for budget in budgets)


CLAIM = Claim(
    says=__doc__,
    source=Source(LYCHEE_DECODE, "table 1"),
    settings=Retrieving(FILE, counts=(16,), budgets=BUDGETS, others=_others(BUDGETS)),
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
).elsewhere(
    settings=Retrieving(
        PUBLISHED_FILE, (FOUR_LAYERS,), PUBLISHED_BUDGETS, _others(PUBLISHED_BUDGETS), texts=40, choice=PUBLISHED
    ),
    tests=(
        _above("*", f"hardkuma {FOUR_LAYERS}", "query", reported=0.012, decides=True),
        *(_above(str(budget), f"hardkuma {FOUR_LAYERS}", "query") for budget in PUBLISHED_BUDGETS),
        _above("*", f"hardkuma {FOUR_LAYERS}", "kv"),
        *(_above("*", f"direct {FOUR_LAYERS}", heads) for heads in ("query", "kv")),
    ),
    premises=(PUBLISHED_STANDS,),
    instrument="a model on which sharing by whole layers loses answers",
)
