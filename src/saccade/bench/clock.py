"""Where the time of a decoding step goes: the parts of `attend`, timed from outside."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..decode.state import AttentionOperations, DecodeState

PARTS = ("selection", "attention", "index")


class Clock:
    """Seconds that a state's attention, selection and index upkeep take, since the last reading.

    The parts do not overlap, and a clock read takes less than a microsecond, so that timed steps can carry it.
    """

    def __init__(self, state: DecodeState) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        state.attention = wrapped(state.attention, lambda operation: self._timed("attention", operation))
        indexes, selector = state.indexes, state.plan.selector
        timed: Any = _Timed(indexes, of=self._timed("index", indexes.of))
        state.indexes = timed
        if selector is not None:
            timed = _Timed(selector, select=self._timed("selection", selector.select))
            state.plan = replace(state.plan, selector=timed)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
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


def wrapped(operations: AttentionOperations, around: Callable[[Callable[..., Any]], Any]) -> AttentionOperations:
    """The same operations, each with something around it."""
    dense, sparse, hybrid = (around(each) for each in (operations.dense, operations.sparse, operations.hybrid))
    return replace(operations, dense=dense, sparse=sparse, hybrid=hybrid)


class _Timed:
    """What it was, but for the time that a method is seen to take."""

    def __init__(self, what: object, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods, _what=what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_what"], name)
