"""Where the time of a decoding step goes: the parts of `attend`, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..decode.state import AttentionOperations, DecodeState

PARTS = ("selection", "attention", "index")


class Clock:
    """Seconds per part since the last reading.

    The parts do not overlap, and a clock read takes less than a microsecond, so that timed steps can carry it.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call with its time counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[part] += time.perf_counter() - start

        return counted

    def read(self) -> dict[str, float]:
        """Seconds of each part; starts again at zero."""
        read, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return read


def watch(state: DecodeState, clock: Clock) -> None:
    """Let a state's attention, selection and index upkeep be timed."""
    state.attention = wrapped(state.attention, lambda operation: clock.timed("attention", operation))
    indexes, selector = state.indexes, state.plan.selector
    timed: Any = _Timed(indexes, of=clock.timed("index", indexes.of))
    state.indexes = timed
    if selector is not None:
        timed = _Timed(selector, select=clock.timed("selection", selector.select))
        state.plan = replace(state.plan, selector=timed)


def wrapped(operations: AttentionOperations, around: Callable[[Callable[..., Any]], Any]) -> AttentionOperations:
    """The same operations, each with something around it."""
    dense, sparse, hybrid = (around(each) for each in (operations.dense, operations.sparse, operations.hybrid))
    return replace(operations, dense=dense, sparse=sparse, hybrid=hybrid)


class _Timed:
    """What it was, but for the time that a method is seen to take."""

    def __init__(self, what: object, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods, _what=what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._what, name)
