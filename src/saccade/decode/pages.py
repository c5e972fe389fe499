"""Bounds of the pages of one batch's cache: made at first use and kept up to date with it."""

from torch import Tensor

from ..plans.plan import Plan
from ..selection.index import NewTokens, PageIndex
from ..types import KVView, Rows
from .indexes import Indexes


class PageIndexes(Indexes):
    """Those that belong to one batch alone; none where the plan's selector has none."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self._held: dict[int, PageIndex] = {}
        self._covered: dict[int, int] = {}
        self._new: NewTokens | None = None

    def begin(self, past: int, clean: int) -> None:
        for layer, covered in self._covered.items():
            self._covered[layer] = min(covered, past)

    def of(self, layer: int, kv: KVView) -> PageIndex | None:
        layer, selector = self._plan.sources.get(layer, layer), self._plan.selector
        if selector is None or layer not in self._plan.refreshing:
            return None
        if layer not in self._held:
            index = selector.new_index(kv)
            if index is None:
                return None
            self._held[layer] = index
        length, covered = kv.rows.max_len, self._covered.get(layer, 0)
        if length != covered and (layer not in self._covered or self._completes(kv.rows, length - covered)):
            self.timed(layer, kv, self._update)
        return self._held[layer]

    def permute(self, rows: Tensor) -> None:
        for index in self._held.values():
            index.permute(rows)

    @property
    def nbytes(self) -> int:
        # A list: another thread may be building while this one asks.
        return sum(index.nbytes for index in list(self._held.values()))

    def _update(self, layer: int, kv: KVView) -> None:
        # A layer that shares it begins with a call's first token once another has come to the last one.
        count = max(kv.rows.max_len - self._covered.get(layer, 0), 1)
        # One object for all layers of a step.
        if self._new is None or self._new.rows is not kv.rows or self._new.count != count:
            self._new = NewTokens(kv.rows, count)
        self._held[layer].update(kv, self._new)
        self._covered[layer] = kv.rows.max_len

    def _completes(self, rows: Rows, new: int) -> bool:
        """Whether the last `new` tokens fill a unit of some row, so that an index has to know of them."""
        assert self._plan.selector is not None, "it has made the index"
        unit = self._plan.selector.granule
        if unit == 1 or rows.bounds is None:
            return True
        return any(length // unit > (length - new) // unit for _, length in rows.bounds)
