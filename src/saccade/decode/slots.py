"""What is due of an index in slots, for indexes that take tokens in: in every adapter."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..plans.plan import Plan
from ..selection.index import KeySizes, LayerIndex, SlotIndex, Views
from ..text.feed import TokenFeed
from ..types import Intake, KVView
from .indexes import Indexes


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


class Slots(Indexes):
    """An index in slots, brought up to date between steps; a runtime says who is in which.

    Args:
        plan: whose selector makes it.
        text: what the sequences are fed.
        slots: how many there are at first.
        index: in memory that was set aside; None: it is made when it is needed, and grows with its sequences.

    Attributes:
        index: None before anything was taken in.
        fixed: whether that lies in memory which it does not leave.
    """

    def __init__(self, plan: Plan, text: TokenFeed | None, slots: int = 0, index: SlotIndex | None = None) -> None:
        super().__init__()
        self._plan, self._text, self._layers = plan, text, tuple(sorted(plan.refreshing))
        self.restart(slots, index)

    def restart(self, slots: int, index: SlotIndex | None = None) -> None:
        """Let there be so many slots, all empty."""
        self.index, self.fixed, self._looked = index, index is not None, [Looked() for _ in range(slots)]

    @property
    def count(self) -> int:
        """Slots that there are; in memory that was set aside, the one behind them may be nobody's."""
        return len(self._looked)

    def clear(self, slot: int) -> None:
        """Let a slot be empty."""
        self._looked[slot] = Looked()
        if self.index is not None:
            self.index.clear(slot)

    def take_back(self, slot: int, kept: int) -> None:
        """Only the first `kept` tokens of a slot are what they were: if more were looked at, it is indexed anew."""
        if kept < self._looked[slot].most:
            self.clear(slot)

    def due(self, slot: int, length: int, clean: int, origin: int = 0) -> Intake:
        """What is to be looked at of a sequence of `length` tokens, the first `clean` of which are clean before a step.

        `origin` is the cache's slot of its first token.
        """
        assert self._plan.selector is not None, "only selectors have indexes"
        return Intake(slot, origin, 0, self._plan.selector.stop(length, clean))

    def bring(self, due: Sequence[Intake], views: Views) -> None:
        """Let those layers have looked at what is due of a step's sequences; `views` know their lengths on the host."""
        if self.index is None and due:
            keys = KeySizes.of(next(iter(views.of([due[0].slot]).values())))
            self.index = self._plan.new_slots(keys, self.count, text=self._text)
        if self.index is None:
            return
        new, layers = list[Intake](), views.layers
        for one in due:
            if one.stop < self._known(one.slot, layers):
                self.clear(one.slot)
            known = self._known(one.slot, layers)
            # In most steps nothing is to be looked at anew.
            if not known == one.stop == self._looked[one.slot].last:
                new.append(replace(one, kept=known))
        if not self.fixed:
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

    def of(self, layer: int, kv: KVView) -> LayerIndex | None:
        """The layer's index; None before anything was taken in, and of a layer that searches none."""
        return None if self.index is None else self.index.layers.get(layer)

    @property
    def nbytes(self) -> int:
        index = self.index  # another thread may be moving it
        return 0 if index is None else index.nbytes

    def _known(self, slot: int, layers: tuple[int, ...]) -> int:
        known = self._looked[slot].known
        return known.get(layers, known.get(self._layers, 0))
