"""The union without a recent window beats TidalDecode's recall; a quarter of recency is best, recency alone worst."""

from ..designs.continuation import Continuation
from ..judging.claim import LESS_IS_MORE, Claim, Direction, Group, Source, Test

TIDAL_QUERY = "tidal:budget=256,heads=query"


def _recent(share: float) -> str:
    return f"less_is_more:budget=256,recent={share:g}"


def _recall(share: float, other: str, direction: Direction = "above", *, decides: bool = True) -> Test:
    effect = f"attention recall, recent={share:g} minus {other.removeprefix('less_is_more:budget=256,')}"
    return Test(effect, "attention", Group(_recent(share)), Group(other), direction=direction, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(LESS_IS_MORE, "figure 7"),
    settings=Continuation(
        arms=(*map(_recent, (0, 0.25, 0.5, 0.75, 1)), TIDAL_QUERY, "tidal:budget=256,heads=kv"), texts=12
    ),
    tests=(
        _recall(0, TIDAL_QUERY),
        _recall(0.25, _recent(0)),
        _recall(0.25, _recent(0.5)),
        _recall(0.25, _recent(0.75)),
        _recall(1, TIDAL_QUERY, "below"),
        _recall(0, "tidal:budget=256,heads=kv", decides=False),
    ),
)
