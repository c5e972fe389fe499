"""A window of a cache that can end earlier again, for rectification runs its last tokens once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer


class RewindingWindow(DynamicSlidingWindowLayer):
    """A layer of a window that holds `reach` tokens more than it shows, and whatever its last call has brought.

    While the past is recorded (`activate_past_recording`, as assistants ask for) it holds all since the last `crop`.
    `keys` and `values`, `[B, Hkv, min(T, window - 1), d]`, are those that stock's layer would show at the same length.
    """

    def __init__(self, window: int, reach: int) -> None:
        super().__init__(window)
        self.reach = reach
        self._held: list[Tensor] = []
        self._stop = 0
        self._shown: Tensor | None = None

    @classmethod
    def adopt(cls, stock: DynamicSlidingWindowLayer, reach: int) -> RewindingWindow:
        """Take over what a layer holds: stock's can end no earlier than now, another of this class as it could."""
        adopted = cls(stock.sliding_window, reach)
        adopted.__dict__.update({**stock.__dict__, "reach": reach})
        return adopted

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past, queries = self.cumulative_length, key_states.shape[-2]
        self._trim()
        before, new = self._between(0, past), [key_states, value_states]
        self._held = [torch.cat(pair, dim=-2) for pair in zip(before, new, strict=True)] if before else new
        self._stop = self.cumulative_length = past + queries
        self._show()
        keys, values = self._between(past - self._visible, self._stop)
        return keys, values

    def end_at(self, slots: int) -> None:
        """Show the window before slot `slots`: hide what lies behind, or show again what was hidden.

        Raises:
            RuntimeError: for a window that is not held any more.
        """
        if slots == self.cumulative_length:
            return
        self._see()
        if slots < 0 or not self._first <= max(slots - self._visible, 0) or slots > self._stop:
            raise RuntimeError(f"the window before slot {slots} is gone; from slot {self._first} on tokens are held")
        self.cumulative_length = slots
        self._show()

    def crop(self, tokens_to_remove: int) -> None:
        length = self.cumulative_length
        self.end_at(min(tokens_to_remove, length) if tokens_to_remove > 0 else max(length + tokens_to_remove, 0))
        self._trim(recorded=True)

    def reset(self) -> None:
        super().reset()
        self._held, self._stop, self._shown = [], 0, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda states: states[indices.to(states.device)])

    @property
    def _visible(self) -> int:
        """Tokens that the next one sees beside itself."""
        return int(self.sliding_window) - 1

    @property
    def _first(self) -> int:
        """Slot of the first token held."""
        return self._stop - (self._held[0].shape[-2] if self._held else 0)

    def _see(self) -> None:
        """Whoever has set `keys` and `values` by hand has set all there is."""
        if self.keys is not self._shown:
            held = [self.keys, self.values] if self.cumulative_length else []
            self._held = [states for states in held if states is not None]
            self._stop, self._shown = self.cumulative_length, self.keys

    def _between(self, start: int, stop: int) -> list[Tensor]:
        """Keys and values of the slots held from `start` on, up to `stop`; nothing if none ever was."""
        self._see()
        first = self._first
        return [states[:, :, max(start - first, 0) : stop - first] for states in self._held]

    def _show(self) -> None:
        start, stop = self.cumulative_length - self._visible, self.cumulative_length
        first = self._first
        self.keys, self.values = (states[:, :, max(start - first, 0) : stop - first] for states in self._held)
        self._shown = self.keys

    def _trim(self, *, recorded: bool = False) -> None:
        """Let go of what can no longer be shown; of what was recorded only if it is said."""
        self._see()
        if recorded or not getattr(self, "record_past", False):
            self._held = self._between(self.cumulative_length - self._visible - self.reach, self._stop)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._trim()
        if self._held:
            self._held = [change(states) for states in self._held]
            self._show()
