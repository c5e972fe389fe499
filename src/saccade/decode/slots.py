"""Who is in which slot of an index, and what of it is due: for indexes that take tokens in, in every adapter."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..plans.plan import Plan
from ..selection.index import KeySizes, LayerIndex, SlotIndex, Views
from ..text.feed import TokenFeed
from ..types import Intake, KVView

MAX_FEW_TOKENS = 512
"""That a sequence brings at most while it decodes: a full buffer, or what a dense pass has made final."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence in the step at hand.

    Attributes:
        slot: where it is.
        start, length: its tokens before the step, and with it.
        clean: its first tokens that are clean.
        decodes: whether it searches in this step, so that nothing may be left for later.
        origin: the cache's slot of its first token.
        source: where its runtime has its tokens; for `TokenFeed.hold`.
    """

    slot: int
    start: int
    length: int
    clean: int
    decodes: bool = True
    origin: int = 0
    source: Any = None


@dataclass(slots=True)
class Looked:
    """How many tokens of what is in a slot an index was told to look at.

    Attributes:
        last, most: the last time, and the most that any layer was.
        known: at least, by layers that are told together; and whether these hold all that follows from them.
    """

    last: int = 0
    most: int = 0
    known: dict[tuple[int, ...], tuple[int, bool]] = field(default_factory=dict)


class Slots:
    """An index in slots, brought up to date between steps.

    Args:
        plan: whose selector makes it.
        text: what the sequences are fed.
        index: in memory that was set aside; None: it is made when it is needed, grows with its sequences, and gives all
            room back when the last has left.
        slots: of which sequences may have one; where a step has rows beside them, the one behind is nobody's.
        rows: the most that a step has which searches memory that was set aside.

    Attributes:
        index: None before anything was taken in.
        count: slots that there are.
    """

    build_seconds = 0.0

    def __init__(
        self, plan: Plan, text: TokenFeed | None, index: SlotIndex | None = None, slots: int = 0, rows: int = 0
    ) -> None:
        self._plan, self._text, self._fixed = plan, text, index is not None
        self.index, self.count, self._rows = index, slots, rows
        self._free: list[int] = [*range(slots)] if self._fixed else []
        self._looked, self._placed = [Looked() for _ in range(slots)], list[int]()
        self._layers = tuple(sorted(plan.refreshing))
        self._places: Tensor | None = None

    def enter(self) -> int:
        """The lowest slot that nobody has; one more if all are taken. What was in it is forgotten."""
        if not self._free:
            assert not self._fixed, "there are as many slots as sequences"
            self._looked.append(Looked())
            self.count += 1
            return self.count - 1
        slot = heapq.heappop(self._free)
        self._looked[slot] = Looked()
        if self.index is not None:
            self.index.forget(slot, 0)
        return slot

    def leave(self, slot: int) -> None:
        """Give a slot back; who comes back is indexed anew, which gives the same index."""
        heapq.heappush(self._free, slot)
        if len(self._free) == self.count and not self._fixed:
            self.index, self.count, self._free, self._looked = None, 0, [], []

    def take_back(self, slot: int, kept: int) -> None:
        """Only the first `kept` tokens of a slot are what they were when they were looked at."""
        looked = self._looked[slot]
        if self.index is not None and kept < looked.most:
            self.index.forget(slot, kept)
            looked.last, looked.most = min(looked.last, kept), kept
            looked.known = {layers: (min(stop, kept), False) for layers, (stop, _) in looked.known.items()}

    def follow(self, arrivals: Sequence[Arrival], views: Views, room: int = 0) -> None:
        """Bring what is in the slots of a step's sequences up to what is clean in the cache before it.

        `views` know their lengths on the host; `room`: tokens of those that do not decode, the most that are looked at.
        """
        selector = self._plan.selector
        assert selector is not None, "only selectors have indexes"
        if self.index is None and arrivals:
            keys = KeySizes.of(next(iter(views.of([arrivals[0].slot]).values())))
            self.index = self._plan.new_slots(keys, self.count, text=self._text)
        if self.index is None:
            return
        few, many, layers = list[Intake](), list[Intake](), views.layers
        for one in arrivals:
            looked, stop = self._looked[one.slot], selector.stop(one.length, min(one.start, one.clean))
            known, whole = looked.known.get(layers) or looked.known.get(self._layers, (0, True))
            if stop < known:
                self.take_back(one.slot, stop)
                known, whole = stop, False
            if not one.decodes:
                stop = min(known + room, stop)
                room -= stop - known
            # In most steps nothing is to be looked at anew.
            if not (whole and known == stop == looked.last):
                if self._text is not None and selector.reads_text:
                    self._text.hold(one.slot, one.source, stop)
                intake = Intake(one.slot, one.origin, known if whole else max(known - 1, 0), stop)
                (few if stop - known <= MAX_FEW_TOKENS else many).append(intake)
        if not self._fixed:
            # Also for who entered and is not asked yet, whose slot is cleared for the next one.
            self.index.grow(self.count, max((intake.stop for intake in (*few, *many)), default=0))
        # As much is planted of every row as of the one that brings most.
        for some in filter(None, (few, many)):
            for intake in some:
                looked = self._looked[intake.slot]
                looked.last, looked.most = intake.stop, max(looked.most, intake.stop)
            self.index.take_in(some, views)
            # Only now: who was interrupted is brought again.
            for intake in some:
                self._looked[intake.slot].known[layers] = intake.stop, True

    def place(self, slots: Sequence[int | None], rows: int, device: torch.device) -> None:
        """Let a step of so many rows search these slots; None, and rows behind them: it searches nobody's.

        In memory that was set aside, they are always told in the same memory, which a graph reads.
        """
        told = [self.count if slot is None else slot for slot in (*slots, *[None] * (rows - len(slots)))]
        if self._places is None or (not self._fixed and rows != len(self._places)):
            self._placed, most = [], self._rows if self._fixed else rows
            self._places = torch.full((most,), self.count, dtype=torch.int32, device=device)
        if self._placed[:rows] != told:
            self._placed[:rows] = told
            new = torch.tensor(told, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            self._places[:rows].copy_(new.to(device, non_blocking=True))
        if self.index is not None:
            self.index.place(told, self._places[:rows])

    def begin(self, past: int, clean: int) -> None:
        """Nothing to forget: every arrival says what was rewritten."""

    def of(self, layer: int, kv: KVView) -> LayerIndex | None:
        """The layer's index; None before anything was taken in, and of a layer that searches none."""
        return None if self.index is None else self.index.layers.get(layer)

    def permute(self, rows: Tensor) -> None:
        """Let slot `i` be what slot `rows[i]` was; they are no longer where a captured step searches them."""
        self.count = len(rows)
        if self._fixed or self.index is None:
            self.index, self._fixed, self._looked = None, False, [Looked() for _ in range(self.count)]
        else:
            looked = (self._looked[row] for row in rows.tolist())
            self._looked = [replace(one, known={**one.known}) for one in looked]
            self.index.permute(rows)

    @property
    def nbytes(self) -> int:
        index = self.index  # another thread may be moving it
        return 0 if index is None else index.nbytes
