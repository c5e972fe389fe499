"""What rectification did: dense passes, tokens run again, drafts and how many of them stood."""

from __future__ import annotations

from ...decode.stats import Rectifications


class Ledger:
    """Counts of one run."""

    def __init__(self) -> None:
        self._passes = self._rewritten = self._drafted = self._accepted = 0

    def rectified(self, tokens: int) -> None:
        """One dense pass ran `tokens` decoded tokens again."""
        self._passes += 1
        self._rewritten += tokens

    def drafted(self, tokens: int) -> None:
        self._drafted += tokens

    def accepted(self) -> None:
        self._accepted += 1

    def read(self) -> Rectifications:
        return Rectifications(self._passes, self._rewritten, self._drafted, self._accepted)
