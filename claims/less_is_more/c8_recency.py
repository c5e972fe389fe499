"""The union without a recent window beats TidalDecode's recall; a quarter of recency is best, recency alone worst."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Direction, Group, Source, Test

KINDS = ("code", "prose")
TIDAL = "tidal:budget=256,heads=query"
SHARES = (0, 0.25, 0.5, 0.75, 1)


def _recent(share: float) -> str:
    return f"less_is_more:budget=256,recent={share:g}"


def _recall(kind: str, share: float, other: str, direction: Direction = "above", *, decides: bool = True) -> Test:
    effect = f"attention recall on {kind}, recent={share:g} minus {other.removeprefix('less_is_more:budget=256,')}"
    of, against = Group(_recent(share)), Group(other)
    return Test(effect, "attention", of, against, direction=direction, decides=decides, at=f"{kind} *")


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 7"),
    settings=Continuation(
        # Four sinks in all arms but the published TidalDecode.
        arms=(*map(_recent, SHARES), TIDAL, f"{TIDAL},sinks=4", f"{TIDAL},sinks=4,window=60"),
        prompt=8192,
        decoded=256,
        kinds=KINDS,
    ),
    tests=tuple(
        test
        for kind in KINDS
        for test in (
            _recall(kind, 0, f"{TIDAL},sinks=4"),
            *(_recall(kind, 0.25, _recent(share)) for share in SHARES if share != 0.25),
            _recall(kind, 1, _recent(0), "below"),
            _recall(kind, 0, TIDAL, decides=False),
            _recall(kind, 0.25, f"{TIDAL},sinks=4,window=60", decides=False),
        )
    ),
)
