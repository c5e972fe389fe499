"""Selecting again in one further layer about doubles token recall."""

from ..designs.questions import Questions
from ..judging.claim import TIDAL, Claim, Group, Source, Test


def _doubled(budget: int, heads: str, reported: float | None = None, *, decides: bool = True) -> Test:
    arms = f"tidal:budget={budget},heads={heads},reselect="
    effect = f"token recall with the best further layer over that without one, budget {budget}, heads={heads}"
    best, none = Group(f"{arms}[0-9]*", "best"), Group(arms)
    return Test(effect, "token", best, none, kind="ratio", bound=1.5, reported=reported, decides=decides)


CLAIM = Claim(
    says=__doc__,
    source=Source(TIDAL, "figure 2b, section 3.1"),
    settings=Questions(
        arms=tuple(
            f"tidal:budget={budget},heads={heads},reselect={layer}"
            for budget, heads in ((256, "query"), (256, "kv"))
            for layer in ("", "{layer}")
        ),
        recall=True,
    ),
    tests=(_doubled(256, "query", reported=2.0), _doubled(256, "kv", decides=False)),
)
