"""Products of many cases: some run every time, all in `make walk`."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

walk = pytest.mark.walk


def crossed(rows: Iterable[Any], columns: Iterable[Any], every_time: Callable[[Any, Any], bool]) -> list[Any]:
    """All pairs; those that `every_time` leaves out run in `make walk` alone."""
    columns = list(columns)
    return [
        pytest.param(row, column, marks=() if every_time(row, column) else walk) for row in rows for column in columns
    ]


def among(everything: Iterable[Any], every_time: Iterable[Any]) -> list[Any]:
    """All cases; those that are not named too run in `make walk` alone."""
    chosen, everything = list(every_time), list(everything)
    assert all(one in everything for one in chosen), "a case that runs every time is one of all"
    return [
        one if one in chosen else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=walk)
        for one in everything
    ]


def in_turn(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """All pairs, of which every row and every column comes at least once every time."""
    rows, columns = list(rows), list(columns)
    longer = max(len(rows), len(columns))
    chosen = {(place % len(rows), place % len(columns)) for place in range(longer)}
    return [
        pytest.param(row, column, marks=() if (one, other) in chosen else walk)
        for one, row in enumerate(rows)
        for other, column in enumerate(columns)
    ]


def drawn(examples: int) -> settings:
    """So many drawn examples in `make walk`, a third of them every time."""
    return settings(max_examples=examples if os.environ.get("SACCADE_WALK") else max(examples // 3, 2))
