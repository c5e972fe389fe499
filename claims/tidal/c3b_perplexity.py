"""TidalDecode has lower perplexity than Quest on long text, early and late."""

from ..designs.continuation import Continuation
from ..judging.claim import TIDAL, Claim, Group, Source, Test


def _lower(measure: str, heads: str, *, decides: bool = True) -> Test:
    effect = f"{measure} of the next token, tidal minus quest, heads={heads}"
    tidal, quest = (Group(f"{name}:budget=256,heads={heads}") for name in ("tidal", "quest"))
    return Test(effect, measure, tidal, quest, direction="below", decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "figure 4"),
    settings=Continuation(
        arms=(
            "dense",
            *(f"{name}:budget=256,heads={heads}" for name in ("tidal", "quest") for heads in ("query", "kv")),
        ),
        decoded=2048,
        texts=24,
    ),
    tests=(
        _lower("loss@1", "query"),
        _lower("loss@4", "query"),
        _lower("loss", "kv", decides=False),
        Test(
            "loss of the next token, tidal minus dense, heads=query",
            "loss",
            Group("tidal:*heads=query"),
            Group("dense"),
            direction="below",
            bound=0.05,
            decides=False,
        ),
    ),
)
