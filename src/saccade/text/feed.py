"""Token ids of the sequences in slots, and what a table of chunks reads of their text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

UNREAD = "some tokens were fed as embeddings or are not in the tokenizer's vocabulary; their chunks have a fixed length"

UNKNOWN = -1
"""Instead of the id of a token that was fed as an embedding."""
_ABSENT = -2


class TokenFeed(ABC):
    """What the sequences in the slots of an index were fed; a runtime has its own.

    Attributes:
        levels: how text breaks around every vocabulary id (`saccade.text.levels`), None without a tokenizer.
        unread: whether text was asked for where none is known, as where a model was fed embeddings.
    """

    def __init__(self, levels: Sequence[int] | None = None) -> None:
        self.levels = levels
        self._table: Tensor | None = None
        self.unread: Tensor | bool = False

    @abstractmethod
    def read(self, row: int, start: int, stop: int) -> Tensor:
        """Ids at slots `start..stop` of a row of the cache, int32 or int64; -1: unknown."""

    def window(self, spans: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
        """Those numbers, int32 `[n, w]`, at slots `start..stop` of a row, for each `(row, start, stop)`.

        -1: unknown, or behind the stop of one that is shorter than others.
        """
        if self.levels is None:
            width = max(stop - start for _, start, stop in spans)
            return torch.full((len(spans), width), UNKNOWN, dtype=torch.int32, device=device)
        if self._table is None:
            # The last place stands for every id that is not in the vocabulary.
            table = torch.tensor([*self.levels, UNKNOWN], dtype=torch.int32, device="cpu")
            self._table = table.to(device, non_blocking=True)
        read = [self.read(*span).to(device, non_blocking=True) for span in spans]
        ids = pad_sequence(read, batch_first=True, padding_value=_ABSENT)
        known = (ids >= 0) & (ids < len(self.levels))
        self.unread = ((ids == UNKNOWN) | (ids >= len(self.levels))).any() | self.unread
        return self._table[torch.where(known, ids, len(self.levels))]
