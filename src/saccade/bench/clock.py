"""Where the time of a decoding step goes: the parts of `attend`, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..decode.indexes import Indexes
from ..decode.state import AttentionOperations, DecodeState
from ..selection.selector import Index, Selector
from ..types import KVView

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
    state.attention = timed_operations(state.attention, clock)
    state.indexes = _TimedIndexes(state.indexes, clock)
    if state.plan.selector is not None:
        timed: Any = _TimedSelector(state.plan.selector, clock)
        state.plan = replace(state.plan, selector=timed)


def timed_operations(operations: AttentionOperations, clock: Clock) -> AttentionOperations:
    return AttentionOperations(
        dense=clock.timed("attention", operations.dense),
        sparse=clock.timed("attention", operations.sparse),
        hybrid=clock.timed("attention", operations.hybrid),
        name=operations.name,
    )


class _TimedSelector:
    """A selector that is what it was, but for the time its choices are seen to take."""

    def __init__(self, selector: Selector, clock: Clock) -> None:
        self._selector = selector
        self.select = clock.timed("selection", selector.select)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


class _TimedIndexes:
    """Indexes whose upkeep is timed."""

    def __init__(self, indexes: Indexes, clock: Clock) -> None:
        self._indexes = indexes
        self._of = clock.timed("index", indexes.of)

    def begin(self, past: int) -> None:
        self._indexes.begin(past)

    def of(self, layer: int, kv: KVView) -> Index | None:
        index: Index | None = self._of(layer, kv)
        return index

    def permute(self, layer: int, rows: Tensor) -> None:
        self._indexes.permute(layer, rows)

    @property
    def nbytes(self) -> int:
        return self._indexes.nbytes

    @property
    def build_seconds(self) -> float:
        return self._indexes.build_seconds
