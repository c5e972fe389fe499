"""What was fed to a model, slot by slot of its cache: token ids, their positions, and how far the cache is clean."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger("saccade")

UNREAD = "some tokens were fed as embeddings or are not in the tokenizer's vocabulary; their chunks have a fixed length"

ALL_CLEAN = 2**62
"""`clean` of a cache that nobody rectifies: all of it counts as final."""

_UNKNOWN = -1
_GROWTH = 256


class TokenHistory:
    """Token ids and position ids beside one cache, by slot; unknown where a model was fed embeddings.

    Attributes:
        levels: delimiter level of every vocabulary id (`saccade.selection.chunking`), None without a tokenizer.
        clean: slots below it hold keys and values that no sparse step wrote, or that were rectified since.
        has_unread: whether text was asked for where none is known, as where a model was fed embeddings.
    """

    def __init__(self, levels: Sequence[int] | None = None) -> None:
        self.levels = levels
        self.clean = ALL_CLEAN
        self.has_unread = False
        self._length = 0
        self._fed: Tensor | None = None

    def record(self, past: int, queries: int, batch: int, ids: Tensor | None, positions: Tensor | None) -> None:
        """Note what is fed behind `past` slots: int64 `[B, queries]` each, or None; whatever lay there before goes."""
        stop = past + queries
        fed = self._room(batch, stop, ids if ids is not None else positions)
        fed[:, :, self._length : past] = _UNKNOWN
        for row, given in enumerate((ids, positions)):
            fed[row, :, past:stop] = _UNKNOWN if given is None else given
        self._length = stop

    def ids(self, start: int, stop: int) -> Tensor | None:
        """Token ids int64 `[B, stop - start]`; None if one of them is unknown."""
        return self._slice(0, start, stop)

    def positions(self, start: int, stop: int) -> Tensor | None:
        """Position ids int64 `[B, stop - start]`; None if one of them is unknown."""
        return self._slice(1, start, stop)

    def levels_of(self, row: int, start: int, stop: int) -> list[int] | None:
        """Delimiter levels of the tokens at slots `start..stop` of a row; None if ids or levels are unknown."""
        if self.levels is None or self._fed is None or stop > self._length:
            return None
        ids = self._fed[0, row, start:stop].tolist()
        if any(not 0 <= token < len(self.levels) for token in ids):
            if not self.has_unread:
                self.has_unread = True
                logger.warning(UNREAD)
            return None
        return [self.levels[token] for token in ids]

    def continued(self, levels: Sequence[int] | None) -> TokenHistory:
        """The same feed for another run on the same cache, which may know other levels."""
        other = TokenHistory(levels)
        other.clean, other._length = self.clean, self._length
        other._fed = None if self._fed is None else self._fed.clone()
        return other

    def permute(self, rows: Tensor) -> None:
        """Let new batch row `i` be what row `rows[i]` was (int64 `[B']`)."""
        if self._fed is not None:
            self._fed = self._fed.index_select(1, rows.to(self._fed.device))

    def _slice(self, row: int, start: int, stop: int) -> Tensor | None:
        if self._fed is None or not 0 <= start <= stop <= self._length:
            return None
        part = self._fed[row, :, start:stop]
        return None if bool((part == _UNKNOWN).any()) else part.clone()

    def _room(self, batch: int, slots: int, like: Tensor | None) -> Tensor:
        """The buffer `[2, B, capacity]`; a cache whose batch has changed unasked is another one."""
        held = self._fed
        if held is None or held.shape[1] != batch:
            device = None if like is None else like.device
            held = torch.empty((2, batch, 0), dtype=torch.int64, device=device)
            self._length = 0
        if held.shape[2] < slots:
            wider = held.new_full((2, batch, slots + max(_GROWTH, slots // 8)), _UNKNOWN)
            wider[:, :, : self._length] = held[:, :, : self._length]
            held = wider
        self._fed = held
        return held
