"""Asks for policies that are not valid, and reads the one line that is said."""

from __future__ import annotations

from typing import Any

import pytest

import saccade

from .drawing import SHAPE


def bad(*words: str, **options: Any) -> None:
    """`saccade.policy` refuses in one line that holds all words."""
    with pytest.raises(saccade.PolicyError) as error:
        saccade.policy(**options)
    check_line(str(error.value), words)


def check_line(message: str, words: tuple[str, ...]) -> None:
    assert "\n" not in message and message == message.strip()
    assert all(word in message for word in words), message


def refusal(name: str, **options: Any) -> str:
    """What is said of a policy and of its plan, empty if they are valid; other errors pass through."""
    try:
        saccade.policy(name, **options).plan(SHAPE)
    except saccade.PolicyError as error:
        return str(error)
    return ""
