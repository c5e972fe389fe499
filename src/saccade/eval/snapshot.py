"""What of a cache no crop brings back: layers with a window, and recurrent ones, forget what they have read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a cache holds beside its `full` layers, those with full attention, which can be cropped; copies."""

    full: Collection[int]
    held: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, cache: Any, full: Collection[int], rows: Tensor | None = None) -> Snapshot:
        """Copy it; row `i` of the copy is row `rows[i]`, int64 `[B]`, or itself."""

        def chosen(tensor: Tensor) -> Tensor:
            # A number is of no row.
            return tensor.clone() if rows is None or tensor.dim() < 2 else tensor.index_select(0, rows)

        return cls(full, tuple(_changed(holder, chosen) for holder in _holders(cache, full)))

    def put_back(self, cache: Any) -> None:
        """Let the cache hold copies of it again; recurrent layers write into theirs."""
        for holder, held in zip(_holders(cache, self.full), self.held, strict=True):
            holder.update(_changed(held, torch.clone))


def _holders(cache: Any, full: Collection[int]) -> Iterator[dict[str, Any]]:
    """Attributes of the other layers, and those of the cache itself: some models keep recurrent states there."""
    yield from (vars(layer) for number, layer in enumerate(cache.layers) if number not in full)
    yield vars(cache)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Attributes made anew, with `change` of every tensor in them, however deep; layers are left out."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _changed(one, change) for name, one in value.items() if name != "layers"}
    return [_changed(one, change) for one in value] if isinstance(value, list) else value
