"""An index in slots that belongs to one batch alone, whose row i is in slot i."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..plans.plan import Plan
from ..plans.rectify import ALL
from ..selection.index import KeySizes, LayerIndex, Views
from ..text.feed import TokenFeed
from ..types import KVView
from .slots import Slots

Seen = Callable[[Sequence[int]], Mapping[int, KVView]]


class RowSlots(Slots):
    """It takes tokens in layer by layer as these are asked, or ahead of a step whose lengths only a device knows.

    Only the former are timed.
    """

    def __init__(self, plan: Plan, text: TokenFeed) -> None:
        super().__init__(plan, text)
        self._past = self._clean = ALL

    def begin(self, past: int, clean: int) -> None:
        # Prompts follow nothing: what one of them has taken back, a later call finds.
        self._past, self._clean = min(self._past, past), clean

    def fix(self, seen: Callable[[], KVView], longest: int) -> None:
        """Move it to memory for rows of at most `longest` tokens, which it does not leave while they stay in order.

        What was taken in is taken in anew. `seen` gives a layer's cache.
        """
        if not self.fixed and not self._plan.moves_index:
            kv = seen()
            sizes = KeySizes.of(kv), kv.rows.batch
            self.restart(kv.rows.batch, self._plan.new_slots(*sizes, longest=longest, text=self._text, fixed=True))

    def follow(self, bounds: Sequence[tuple[int, int]], layers: tuple[int, ...], seen: Seen) -> None:
        """Take in what a step, behind which rows have these starts and lengths, finds below its last token.

        `seen` gives the caches of `layers` as some rows see them.
        """
        for row, (origin, _) in enumerate(bounds):
            self.take_back(row, max(self._past - origin, 0))
        # A call's later tokens, and other layers, find what it has written.
        self._past = ALL
        due = [
            self.due(row, length, max(min(length - 1, self._clean - origin), 0), origin)
            for row, (origin, length) in enumerate(bounds)
        ]
        self.bring(due, Views(layers, seen))

    def of(self, layer: int, kv: KVView) -> LayerIndex | None:
        layer = self._plan.sources.get(layer, layer)
        # Else it was followed before the step.
        if kv.rows.bounds is not None and layer in self._plan.refreshing:
            self.timed(layer, kv, self._take_in)
        return super().of(layer, kv)

    def permute(self, rows: Tensor) -> None:
        """They are no longer where a captured step searches them."""
        if self.fixed or self.index is None:
            self.restart(len(rows))
            return
        looked = (self._looked[row] for row in rows.tolist())
        self._looked = [replace(one, known={**one.known}) for one in looked]
        self.index.permute(rows)

    def _take_in(self, layer: int, kv: KVView) -> None:
        assert kv.rows.bounds is not None, "the host knows this call's lengths"
        if self.count != kv.rows.batch:
            self.restart(kv.rows.batch)
        self.follow(kv.rows.bounds, (layer,), lambda rows: {layer: kv.picked([*rows])})
