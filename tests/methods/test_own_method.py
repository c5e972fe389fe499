"""A method that is not ours does what ours do, once it is registered: it is listed, compared, and decodes."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import own_method
import saccade
from commands import invoker
from own_method import NAME, PACKAGE, SAME, installed
from saccade.calibrate.candidates import families
from saccade.cli import app
from saccade.eval.entry import usual_policies

from .drawing import SHAPE


@pytest.fixture(params=["registered", "entry point"])
def known(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """The method in both ways in which it becomes known."""
    by_hand = request.param == "registered"
    with installed(tmp_path, **({} if by_hand else {"METHOD": NAME})):
        if by_hand:
            saccade.register(importlib.import_module(PACKAGE).METHOD)
        yield


@pytest.mark.usefixtures("known")
def test_it_stands_beside_ours() -> None:
    assert list(saccade.policies())[-1] == NAME
    listed = invoker(app)("policies").output
    assert f"{NAME}  the best tokens for a group's mean query" in listed
    assert NAME in [policy.name for policy in usual_policies(None)[0]]
    assert NAME in [policy.name for policy in families(None, ())]
    costs = invoker(app)("policies", "--cost").output
    assert NAME in costs
    policy = saccade.policy(NAME, budget=64)
    assert saccade.Policy.from_spec(str(policy)) == policy == saccade.Policy.from_json(policy.to_json())
    assert policy.plan(SHAPE) == saccade.Policy.from_spec(f"{SAME},budget=64").plan(SHAPE)


def test_a_name_is_given_once() -> None:
    quest = saccade.policies()["quest"]
    saccade.register(quest)  # again: nothing changes
    other = saccade.Method("quest", "another", "-", quest.options, quest.plan)
    with pytest.raises(saccade.PolicyError, match="a method 'quest' is already there"):
        saccade.register(other)
    assert saccade.policies()["quest"] is quest
    with pytest.raises(saccade.PolicyError, match=r"method name 'my:quest' is not valid: letters"):
        saccade.Method("my:quest", "another", "-", quest.options, quest.plan)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("raise RuntimeError('no such\\n  device')", "cannot be loaded: RuntimeError: no such device"),
        ("", "cannot be loaded: AttributeError"),
        ("METHOD = 3", "is no saccade.Method but 3"),
        (own_method.MODULE.replace('Method("mean_topk"', 'Method("quest"'), "a method 'quest' is already there"),
    ],
)
def test_an_installed_method_that_is_none_is_said_in_one_line(tmp_path: Path, module: str, says: str) -> None:
    with installed(tmp_path, module, METHOD=NAME), pytest.raises(saccade.PolicyError, match=says) as error:
        saccade.policy("quest")
    assert "\n" not in str(error.value)
