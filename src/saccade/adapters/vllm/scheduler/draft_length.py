"""How many tokens to draft before the next dense pass: from what cycles took, and how many of their drafts stood."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

_KEPT, _ENOUGH = 15, 5
"""Cycles of a length whose times are kept, and those behind which its own times say what it takes."""
_TURN, _PROBE = 8, 2
"""Cycles of one length in a row; the first of them is not timed."""
_SOON, _LATE = 64, 4096
"""Cycles from a probe to the next: at first, and at most."""
_FORGETS = 1 / 48
"""Share of what was seen of drafts that each cycle forgets."""


@dataclass(slots=True)
class _Load:
    """Batches of about as many rows and tokens: seconds of their latest cycles by length, and the length that pays.

    `left` cycles of the length `turn` are to come, perhaps as a probe; `waited` of `waits` since the last one are over.
    """

    took: dict[int, deque[float]]
    pays: int
    turn: int = 0
    left: int = 0
    waits: int = _SOON
    waited: int = 0


class DraftLength:
    """Chooses the one of some lengths, ascending from 0, by which a batch gains most tokens a second.

    Batches are told apart by rows and tokens, in steps of the square root of two. Of each an undrafted step is timed
    first, then the shortest drafts; from there the length goes up while that pays. Where no drafts pay they are tried
    again after 64 cycles, 128 and so on, up to 4,096, and after 64 once there are twice as many tokens.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._loads: dict[tuple[int, int], _Load] = {}
        self._judged, self._stood = [0.0] * lengths[-1], [0.0] * lengths[-1]
        self._grown, self._pays = 1, 0

    def next(self, rows: int, tokens: int) -> int:
        """The length of the cycle to come, of so many rows with so many tokens in all."""
        if not self._grown / 4 <= tokens < 2 * self._grown:
            for load in self._loads.values() if tokens > self._grown else ():
                load.waits = _SOON
            self._grown = tokens
        for seen in (self._judged, self._stood):
            seen[:] = [(1 - _FORGETS) * one for one in seen]
        load = self._load(rows, tokens)
        if not load.left:
            load.turn, load.left = self._turn(load)
        load.left -= 1
        load.waited += 1
        self._pays = load.pays
        return load.turn

    def took(self, length: int, rows: int, tokens: int, seconds: float) -> None:
        """Note a cycle: drafts of one length for each row, and the pass that verified them."""
        self._load(rows, tokens).took[length].append(seconds)

    def stood(self, drafted: int, accepted: int) -> None:
        """Note how many of a row's drafts have stood; those behind the first that has not were not judged."""
        for place in range(min(accepted + 1, drafted)):
            self._judged[place] += 1
            self._stood[place] += place < accepted

    def _load(self, rows: int, tokens: int) -> _Load:
        key = round(2 * log2(rows)), round(2 * log2(max(tokens, 1)))
        took = {length: deque[float](maxlen=_KEPT) for length in self._lengths}
        return self._loads.setdefault(key, _Load(took, self._pays))

    def _turn(self, load: _Load) -> tuple[int, int]:
        """The length of the next cycles, and how many they are."""
        shortest = self._lengths[1]
        if len(load.took[0]) < _ENOUGH:
            return 0, _TURN
        if len(load.took[shortest]) < _PROBE:
            return shortest, _PROBE + 1
        up = self._lengths[: self._lengths.index(load.pays) + 2][-1]
        best = min(up, max(self._lengths, key=lambda length: self._pace(load, length)))
        if best != load.pays:
            load.pays, load.waited = best, 0
        elif load.waited >= load.waits:
            # Of drafts that pay the step without them is timed anew.
            load.waits, load.waited = _SOON if load.pays else min(2 * load.waits, _LATE), 0
            return 0 if load.pays else shortest, _PROBE
        return load.pays, _TURN

    def _pace(self, load: _Load, length: int) -> float:
        """Tokens a second of each row."""
        tokens = stands = 1.0
        share = 0.0
        for judged, stood in zip(self._judged[:length], self._stood[:length], strict=True):
            # Doubt speaks for drafts. A place that was never judged gets the rate of the last one that was.
            share = (stood + 0.5) / (judged + 0.5) if judged > 0.5 else share
            stands *= share
            tokens += stands
        return tokens / self._seconds(load, length)

    def _seconds(self, load: _Load, length: int) -> float:
        """What a cycle takes: as timed, or on the line through a step without drafts and the nearest length timed."""
        if length == 0 or len(load.took[length]) >= _ENOUGH:
            return median(load.took[length])
        nearest = min((one for one in self._lengths[1:] if load.took[one]), key=lambda one: abs(one - length))
        plain = median(load.took[0])
        return plain + (median(load.took[nearest]) - plain) * length / nearest
