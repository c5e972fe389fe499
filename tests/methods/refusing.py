"""Asks for policies that are not valid, and reads the one line that is said."""

from collections.abc import Callable, Sequence
from typing import Any

import saccade
from one_line import lacking, said

from .drawing import SHAPE


def line_of(call: Callable[..., Any], *given: Any, **options: Any) -> str:
    """What is said of a policy, empty if it is valid."""
    return said(saccade.PolicyError, call, *given, **options)


def check_line(message: str, words: Sequence[str]) -> None:
    assert lacking([(message, words)]) == []


def refusal(name: str, **options: Any) -> str:
    """What is said of a policy and of its plan, empty if they are valid."""
    return line_of(lambda: saccade.policy(name, **options).plan(SHAPE))
