"""When lossless serving pays, against cycles whose outcomes are enumerated."""

import pytest

from benchmarks.drafts import share_interval
from tables.lossless import VERIFIES, Cycle, chance, cycles


def enumerated(dense: float, sparse: float, stands: float, drafts: int) -> float:
    """Stock's time for what a cycle yields on average, over the cycle's: the first draft that falls ends it."""
    outcomes = [(stands**kept * (1 - stands), kept + 1) for kept in range(drafts)]
    outcomes.append((stands**drafts, drafts + 1))
    cycle = sum([sparse] * drafts) + (VERIFIES * dense if drafts else dense)
    return sum(chance * tokens for chance, tokens in outcomes) * dense / cycle


@pytest.mark.parametrize(
    ("dense", "sparse", "stands"), [(9.0, 5.6, 0.0), (9.0, 5.6, 0.9), (20.5, 7.4, 1.0), (5.0, 5.1, 0.984)]
)
def test_gains_are_those_of_enumerated_cycles(dense: float, sparse: float, stands: float) -> None:
    cycle = Cycle(dense, sparse)
    gains = {drafts: enumerated(dense, sparse, stands, drafts) for drafts in (0, 1, 3, 7)}
    assert {drafts: cycle.gain(stands, drafts) for drafts in gains} == pytest.approx(gains)
    assert gains[cycle.best(stands)] == pytest.approx(max(gains.values())) and max(gains.values()) >= 1


def test_a_chance_is_that_of_accepted_drafts_by_position() -> None:
    assert chance({"by_position": [0.9**place for place in range(1, 9)]}) == pytest.approx(0.9)
    assert chance({"by_position": [0.5, 0.5, 0.0]}) == pytest.approx(0.5)  # of two cycles one has all but the last


def test_what_is_shown_gains_and_is_over_the_mean_of_stocks_runs() -> None:
    def rows(context: int, sparse: float, *, void: bool = False) -> list[dict[str, object]]:
        times = {"stock": 8.0, "less_is_more:budget=2048": sparse, "quest:budget=2048": 6.0, "stock (last)": 9.0}
        about = {"context": context, "batch": 2, "void": void}
        return [{**about, "policy": name, "ms_per_token": ms} for name, ms in times.items()]

    shown = cycles({"rows": [*rows(4096, 8.6), *rows(32768, 5.0), *rows(131072, 5.0, void=True)]})
    assert shown == {"32K × 2": Cycle(8.5, 5.0)}


def test_a_share_is_as_sure_as_its_texts_are_alike() -> None:
    """Of texts of which one half says all and the other nothing; steps alone would seem far surer."""
    low, high = share_interval([100] * 8 + [0] * 8, [100] * 16) or (0, 0)
    # A mean of 16 coins: .5 give or take 1.96 of .5 / 4, in whole sixteenths.
    assert low == pytest.approx(0.5 - 1.96 / 8, abs=1 / 16) and high == pytest.approx(0.5 + 1.96 / 8, abs=1 / 16)
    assert share_interval([30, 60, 90], [100, 200, 300]) == pytest.approx((0.3, 0.3)), "long texts count as such"
    assert share_interval([1, 2], [2, 2]) is None
