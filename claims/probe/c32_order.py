"""The probe's order of the layers that may select again is that of right answers, so it needs no question (kv)."""

from ..designs.ordering import Ordering
from ..judging.claim import SACCADE, Claim, Group, Source, Test

METHODS = ("tidal", "less_is_more")
DENSE = Test("right answers, dense", "right", Group("dense"), bound=0.1)
"""Of fewer, most candidates have none, and ties are no order."""


def deciding(method: str) -> tuple[Test, ...]:
    """What a method must show. Known before: SmolLM2-135M, kv, 60 questions: dense 12, the probe's layer 8, best 9,
    correlation 0.55 (less_is_more)."""
    tried, chosen = f"{method}:*", Group(f"{method}, chosen")
    return (
        # Orders that have nothing to do with each other come to 0.38 by chance among 28 candidates, to 0.43 among 22.
        Test(f"rank correlation over all layers and none, {method}", "order", Group(f"{method}, order"), bound=0.5),
        Test(f"right answers, the probe's layer minus one taken blindly, {method}", "right", chosen, Group(tried)),
        # 3 of 72. Beside: 6 texts do not tell so little, and where the two are one layer there is no interval.
        Test(
            f"right answers, the best layer of the other texts minus the probe's, {method}", "right",
            Group(tried, "best"), chosen, direction="below", bound=0.042, decides=False,
        ),
    )  # fmt: skip


def matters(method: str) -> Test:
    """Without it there is no order."""
    best, blind = Group(f"{method}:*", "best"), Group(f"{method}:*")
    return Test(
        f"right answers, the best layer of the other texts minus one taken blindly, {method}", "right", best, blind
    )


def of_task(says: str | None, task: str) -> Claim:
    """The claim of one task."""
    return Claim(
        says=says,
        source=Source(SACCADE, "calibration, layers"),
        settings=Ordering(task, METHODS),
        tests=tuple(test for method in METHODS for test in deciding(method)),
        premises=(DENSE, *map(matters, METHODS)),
        instrument="a model that answers more, and on which the layer matters",
    )


CLAIM = of_task(__doc__, "kv")
