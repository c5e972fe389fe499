"""Cache correction every 4 or 8 steps makes TidalDecode better."""

from ..designs.continuation import Continuation
from ..judging.claim import TIDAL, Claim, Group, Source, Test


def _better(every: int, heads: str, *, decides: bool = True) -> Test:
    effect = f"loss of the next token where both are sparse, rectify={every} minus none, heads={heads}"
    plain = f"tidal:budget=256,heads={heads}"
    corrected = Group(f"{plain},rectify={every}")
    return Test(effect, f"loss~{every}", corrected, Group(plain), direction="below", decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "figure 8, section 3.2"),
    settings=Continuation(
        arms=(
            "dense",
            *(
                f"tidal:budget=256,heads={heads}{rectify}"
                for heads in ("query", "kv")
                for rectify in ("", ",rectify=4", ",rectify=8")
            ),
        ),
        prompt=8192,
        decoded=256,
        texts=12,
        apart=(4, 8),
        kinds=("code", "prose"),
    ),
    tests=(_better(4, "query"), _better(8, "query"), _better(4, "kv", decides=False), _better(8, "kv", decides=False)),
    premises=(
        Test(
            "loss of the next token, tidal without correction minus dense",
            "loss",
            Group("tidal:budget=256,heads=query"),
            Group("dense"),
            bound=0.0,
        ),
    ),
    instrument="a model on which tidal loses something",
)
