"""What a batch's layers ask for the indexes of their caches, and how long a batch of its own takes to update them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..selection.index import Index
from ..types import KVView


class Indexes(ABC):
    """Indexes of one batch of sequences.

    Attributes:
        build_seconds: that the first update of every layer took.
        later_seconds: that all others took; of a device's only what its host needs.
    """

    def __init__(self) -> None:
        self.build_seconds = self.later_seconds = 0.0
        self._built = set[int]()

    def begin(self, past: int, clean: int) -> None:  # noqa: B027  # those of one batch override it
        """Start a call on a cache of `past` slots: whatever was beyond them has been taken back.

        Sparse steps wrote none of its slots below `clean`, or they were rectified. Nothing is to be done where steps
        say what they write.
        """

    @abstractmethod
    def of(self, layer: int, kv: KVView) -> Index | None:
        """The layer's index, up to date with the cache; None if the policy keeps none there."""

    def permute(self, rows: Tensor) -> None:  # noqa: B027  # likewise
        """Let batch row `i` be what row `rows[i]` was; nothing is to be done where rows say where theirs are."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    def timed(self, layer: int, kv: KVView, update: Callable[[int, KVView], None]) -> None:
        """Run an update of a layer."""
        start = time.perf_counter()
        update(layer, kv)
        if layer in self._built:
            self.later_seconds += time.perf_counter() - start
            return
        # Once per layer and cache, so waiting for the device costs nothing that anybody would notice.
        if kv.k.is_cuda:
            torch.cuda.synchronize(kv.k.device)
        self.build_seconds += time.perf_counter() - start
        self._built.add(layer)
