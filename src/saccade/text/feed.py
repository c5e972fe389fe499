"""Token ids of the sequences in slots, and the delimiter levels that a table of chunks reads of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

UNREAD = "some tokens were fed as embeddings or are not in the tokenizer's vocabulary; their chunks have a fixed length"

UNKNOWN = -1
"""Instead of the id of a token that was fed as an embedding."""
ABSENT = -2
"""Instead of an id where no token is."""


class TokenFeed(ABC):
    """What the sequences in the slots of an index were fed; a runtime has its own.

    Attributes:
        levels: delimiter level of every vocabulary id (`saccade.text.levels`), None without a tokenizer.
    """

    def __init__(self, levels: Sequence[int] | None = None) -> None:
        self.levels = levels
        self._table: Tensor | None = None
        self._unread: Tensor | bool = False

    @abstractmethod
    def read(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Ids int64 `[n, w]` at cache slots `[n, w]` of `rows` `[n]`; -1: unknown, below: no token."""

    @abstractmethod
    def hold(self, row: int, source: Any, stop: int) -> None:
        """Let the first `stop` tokens of a row be read, which a runtime has in a `source` of its own."""

    def window(self, rows: Tensor, first: Tensor, width: int) -> Tensor:
        """Delimiter levels int8 `[n, width]` from slot `first[i]` of row `rows[i]` (int64 `[n]`) on; -1: unknown."""
        slots = first[:, None] + torch.arange(width, device=first.device)
        if self.levels is None:
            return torch.full_like(slots, UNKNOWN, dtype=torch.int8)
        if self._table is None:
            # The last place stands for every id that is not in the vocabulary.
            table = torch.tensor([*self.levels, UNKNOWN], dtype=torch.int8, device="cpu")
            self._table = table.to(slots.device, non_blocking=True)
        ids = self.read(rows, slots)
        known = (ids >= 0) & (ids < len(self.levels))
        self._unread = ((ids == UNKNOWN) | (ids >= len(self.levels))).any() | self._unread
        return self._table[torch.where(known, ids, len(self.levels))]

    @property
    def unread(self) -> Tensor | bool:
        """Whether text was asked for where none is known, as where a model was fed embeddings."""
        return self._unread
