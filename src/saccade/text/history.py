"""What was fed to a model, slot by slot of its cache: token ids and their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .feed import UNKNOWN, TokenFeed

_GROWTH = 256


class TokenHistory(TokenFeed):
    """Token ids and position ids beside one cache, by slot; unknown where a model was fed embeddings.

    Attributes:
        length: slots of which this knows that they are filled.
        prompt: slots below it were fed as prompt, or in calls before one.
    """

    def __init__(self, levels: Sequence[int] | None = None) -> None:
        super().__init__(levels)
        self.length = self.prompt = 0
        self._fed = torch.empty((2, 0, 0), dtype=torch.int64, device="cpu")

    def record(self, past: int, queries: int, batch: int, ids: Tensor | None, positions: Tensor | None) -> bool:
        """Note what is fed behind `past` slots: int64 `[B, queries]` each, or None; whatever lay there before goes.

        Returns whether some of those slots were filled unseen.
        """
        stop = past + queries
        like = ids if ids is not None else positions
        fed = self._room(batch, stop, None if like is None else like.device)
        unseen = self.length < past
        fed[:, :, self.length : past] = UNKNOWN
        for row, given in enumerate((ids, positions)):
            fed[row, :, past:stop] = UNKNOWN if given is None else given
        self.length = stop
        return unseen

    def forget(self, slots: int) -> None:
        """What was fed from slot `slots` on was taken back; others may come there unseen."""
        self.length = min(self.length, slots)

    def ids(self, start: int, stop: int) -> Tensor | None:
        """Token ids int64 `[B, stop - start]`; None if one of them is unknown."""
        return self._slice(0, start, stop)

    def fed(self, start: int, stop: int) -> Tensor:
        """As `ids`, of slots whose ids are known to be known: nothing waits for the device."""
        assert stop <= self.length, "they were recorded"
        return self._fed[0, :, start:stop]

    def positions(self, start: int, stop: int) -> Tensor | None:
        """Position ids int64 `[B, stop - start]`; None if one of them is unknown."""
        return self._slice(1, start, stop)

    def read(self, row: int, start: int, stop: int) -> Tensor:
        return self.fed(start, stop)[row]

    def continued(self, levels: Sequence[int] | None) -> TokenHistory:
        """The same feed for another run on the same cache, which may know other levels."""
        other = TokenHistory(levels)
        other.prompt, other.length = self.prompt, self.length
        other._fed = self._fed.clone()
        return other

    def permute(self, rows: Tensor) -> None:
        """Let new batch row `i` be what row `rows[i]` was (int64 `[B']`)."""
        if self.length:
            self._fed = self._fed.index_select(1, rows.to(self._fed.device))

    def _slice(self, row: int, start: int, stop: int) -> Tensor | None:
        if not 0 <= start <= stop <= self.length:
            return None
        part = self._fed[row, :, start:stop]
        return None if bool((part == UNKNOWN).any()) else part.clone()

    def _room(self, batch: int, slots: int, device: torch.device | None) -> Tensor:
        """The buffer `[2, B, capacity]`; a cache whose batch has changed unasked is another one."""
        if self._fed.shape[1] != batch:
            self._fed, self.length = torch.empty((2, batch, 0), dtype=torch.int64, device=device), 0
        if self._fed.shape[2] < slots:
            self._fed = pad(self._fed, (0, slots + max(_GROWTH, slots // 8) - self._fed.shape[2]), value=UNKNOWN)
        return self._fed
