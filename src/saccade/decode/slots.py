"""Who is in which slot of an index, and what of it is due: for indexes that take tokens in, in every adapter."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..plans.plan import Plan
from ..selection.index import KeySizes, LayerIndex, SlotIndex, Views
from ..text.feed import TokenFeed
from ..types import Intake, KVView


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence in the step at hand.

    Attributes:
        slot: where it is.
        start, length: its tokens before the step, and with it.
        clean: its first tokens that are clean.
        origin: the cache's slot of its first token.
    """

    slot: int
    start: int
    length: int
    clean: int
    origin: int = 0


@dataclass(slots=True)
class Looked:
    """How many tokens of what is in a slot an index was told to look at.

    Attributes:
        last, most: the last time, and the most that any layer was.
        known: at least, by layers that are told together.
    """

    last: int = 0
    most: int = 0
    known: dict[tuple[int, ...], int] = field(default_factory=dict)


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
        """The lowest slot that nobody has, empty; one more if all are taken."""
        if not self._free:
            assert not self._fixed, "there are as many slots as sequences"
            self._looked.append(Looked())
            self.count += 1
            return self.count - 1
        slot = heapq.heappop(self._free)
        self._clear(slot)
        return slot

    def leave(self, slot: int) -> None:
        """Give a slot back; who comes back is indexed anew, which gives the same index."""
        heapq.heappush(self._free, slot)
        if len(self._free) == self.count and not self._fixed:
            self.index, self.count, self._free, self._looked = None, 0, [], []

    def take_back(self, slot: int, kept: int) -> None:
        """Only the first `kept` tokens of a slot are what they were: if more were looked at, it is indexed anew."""
        if kept < self._looked[slot].most:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        self._looked[slot] = Looked()
        if self.index is not None:
            self.index.clear(slot)

    def follow(self, arrivals: Sequence[Arrival], views: Views) -> None:
        """Bring what is in the slots of a step's sequences up to what is clean in the cache before it.

        `views` know their lengths on the host.
        """
        selector = self._plan.selector
        assert selector is not None, "only selectors have indexes"
        if self.index is None and arrivals:
            keys = KeySizes.of(next(iter(views.of([arrivals[0].slot]).values())))
            self.index = self._plan.new_slots(keys, self.count, text=self._text)
        if self.index is None:
            return
        new, layers = list[Intake](), views.layers
        for one in arrivals:
            stop = selector.stop(one.length, min(one.start, one.clean))
            if stop < self._known(one.slot, layers):
                self._clear(one.slot)
            known = self._known(one.slot, layers)
            # In most steps nothing is to be looked at anew.
            if not known == stop == self._looked[one.slot].last:
                new.append(Intake(one.slot, one.origin, known, stop))
        if not self._fixed:
            # Also for who entered and is not asked yet, whose slot is cleared for the next one.
            self.index.grow(self.count, max((intake.stop for intake in new), default=0))
        for intake in new:
            looked = self._looked[intake.slot]
            looked.last, looked.most = intake.stop, max(looked.most, intake.stop)
        if new:
            self.index.take_in(new, views)
        # Only now: who was interrupted is brought again.
        for intake in new:
            self._looked[intake.slot].known[layers] = intake.stop

    def _known(self, slot: int, layers: tuple[int, ...]) -> int:
        known = self._looked[slot].known
        return known.get(layers, known.get(self._layers, 0))

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
