"""A window of a cache that can end earlier again, for rectification runs its last tokens once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer


class RewindingWindow(DynamicSlidingWindowLayer):
    """A layer of a window that holds `reach` tokens more than it shows.

    Behind `end_at` it also holds whatever the next call brings, which verification shows again later. While
    stock records the past it holds everything until `crop`. `keys` and `values`, `[B, Hkv, min(T, window - 1), d]`, are
    those that stock's layer would show at the same length.
    """

    record_past = False  # as transformers 4 has it, which never asks

    def __init__(self, window: int, reach: int) -> None:
        super().__init__(window)
        self.reach = reach
        self._held: list[Tensor] = []
        self._stop = 0
        self._shown: Tensor | None = None

    @classmethod
    def adopt(cls, stock: DynamicSlidingWindowLayer, reach: int) -> RewindingWindow:
        """Take over what a layer holds.

        A stock layer can end no earlier than it does now; another of this class no earlier than it could.
        """
        adopted = cls(stock.sliding_window, reach)
        adopted.__dict__.update({**stock.__dict__, "reach": reach})
        return adopted

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self._see()
        past, recorded = self.cumulative_length, self.record_past
        rewound, new = past < self._stop, [key_states, value_states]
        before = self._between(0 if recorded else past - self._visible - self.reach, past)
        self._held = [torch.cat(pair, dim=-2) for pair in zip(before, new, strict=True)] if before else new
        self._stop = self.cumulative_length = past + key_states.shape[-2]
        keys, values = self._between(past - self._visible, self._stop)
        if not rewound and not recorded:
            self._trim()
        self._show()
        return keys, values

    def end_at(self, slots: int) -> None:
        """Show the window before slot `slots`, what was hidden included; a RuntimeError if it is not held any more."""
        if slots == self.cumulative_length:
            return
        self._see()
        if slots < 0 or self._first > max(slots - self._visible, 0) or slots > self._stop:
            raise RuntimeError(f"the window before slot {slots} is gone; from slot {self._first} on tokens are held")
        self.cumulative_length = slots
        self._show()

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back for good, all if they are fewer; above 0, keep so many. `RuntimeError` as in `end_at`."""
        length = self.cumulative_length
        self.end_at(min(tokens_to_remove, length) if tokens_to_remove > 0 else max(length + tokens_to_remove, 0))
        self._trim()

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

    def _trim(self) -> None:
        """Hold `reach` tokens more than are shown, and nothing behind them."""
        stop = self.cumulative_length
        self._held, self._stop = self._between(stop - self._visible - self.reach, stop), stop

    def _show(self) -> None:
        start, stop = self.cumulative_length - self._visible, self.cumulative_length
        self.keys, self.values = self._between(start, stop)
        self._shown = self.keys

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._see()
        if self._held:
            self._held = [change(states) for states in self._held]
            self._show()
