"""What a forward call is, from what its caller has said: prompt, decoding, both, or a dense pass over drafts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from saccade.adapters.hf.call import Call, Caller, Callers


@pytest.mark.parametrize(
    ("known", "past", "queries", "prompt"),
    [
        ({}, 0, 7, 7),
        ({}, 0, 1, 1),
        ({}, 7, 1, 0),
        ({}, 7, 3, 3),
        ({"decoding": True}, 0, 7, 0),
        ({"decoding": True}, 7, 3, 0),
        ({"prompt": 7}, 0, 4, 4),
        ({"prompt": 7}, 4, 3, 3),
        ({"prompt": 7}, 6, 1, 1),
        ({"prompt": 7}, 4, 5, 3),
        ({"prompt": 7}, 7, 3, 0),
        ({"prompt": 7, "decoding": True}, 0, 7, 0),
        ({"prompt": 7, "decoding": True}, 6, 1, 0),
        ({"prompt": 7, "purpose": "draft"}, 7, 1, 0),
        ({"prompt": 7, "purpose": "dense"}, 7, 1, 1),
        ({"prompt": 7, "purpose": "check"}, 7, 5, 5),
    ],
)
def test_positions_are_prompt_or_decode(known: dict[str, Any], past: int, queries: int, prompt: int) -> None:
    again = known.get("purpose") == "check"
    assert Caller(**known).call(past, queries) == Call(past, queries, prompt, again=again)


def test_what_was_known_before_holds_again() -> None:
    callers = Callers()
    with callers.knowing(prompt=7):
        with suppress(KeyboardInterrupt), callers.knowing(prompt=9, decoding=True):
            assert callers.here == Caller(prompt=9, decoding=True)
            raise KeyboardInterrupt
        assert callers.here == Caller(prompt=7)
        with pytest.raises(TypeError), callers.knowing(prompts=9):
            pass
    assert callers.here == Caller()
