"""Arms of which a claim says that they keep the same first and last tokens do."""

from pathlib import Path

import pytest

from claims.judging.discovery import found
from claims.judging.study import Study
from claims.less_is_more.c7_long_generation import FRAMED
from claims.less_is_more.c9_transfer import FRAME, RARE_HEADS, UNION

LENGTH = 8192
WITH_A_WINDOW = {"C7": (FRAMED,), "C8": ("window=60",), "C9": (FRAME, "roles=select"), "C9b": (FRAME,)}
"""What an arm is called that stands for LessIsMore's frame in its tests."""


@pytest.mark.parametrize("number", WITH_A_WINDOW)
def test_frames_are_equal(number: str, tmp_path: Path) -> None:
    claim, study = found()[number].claim, Study(None, tmp_path)
    pairs = {(test.of.arms, test.against.arms) for test in claim.tests if test.against is not None}
    compared = [pair for pair in pairs if any(name in arm for arm in pair for name in WITH_A_WINDOW[number])]
    assert compared
    for pair in compared:
        plans = [policy.plan(study.subject.shape) for policy in study.policies(pair).values()]
        assert {plan.selector and plan.selector.frame(LENGTH) for plan in plans} == {(4, 60)}


def test_without_a_window_both_keep_the_current_token_alone(tmp_path: Path) -> None:
    study = Study(None, tmp_path)
    plans = [policy.plan(study.subject.shape) for policy in study.policies((UNION, f"{RARE_HEADS}sinks=4")).values()]
    assert [plan.selector and plan.selector.frame(LENGTH) for plan in plans] == [(4, 1)] * 2
