"""A session: one cache under one run. It knows which positions are prompt and where each row starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedModelError
from ...state import DecodeState
from ...types import KVView, Rows


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call: `prompt` of its `queries` positions are prompt, the others decode; `past` slots are filled."""

    past: int
    queries: int
    prompt: int


class Session:
    """What lives beside one cache: the decode state and the metadata of the step at hand."""

    def __init__(self, state: DecodeState) -> None:
        self.state = state
        self.call = Call(0, 0, 0)
        self._steps: list[Rows] = []

    def begin(self, call: Call) -> None:
        """Start a forward call; rows are prepared when its first layer asks."""
        self.call = call
        self._steps = []

    def reset(self) -> None:
        """Forget everything about the sequences; the cache was emptied."""
        self.state = self.state.fresh()

    def views(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> list[KVView]:
        """The cache as each decoding position of this call sees it.

        Args:
            keys, values: `[B, Hkv, T, d]` by strides.
            mask: bool `[B, 1, queries, T]` as transformers made it, or None if nothing is padded.
        """
        if not self._steps:
            self._steps = self._prepare(keys, mask)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        return [KVView(k, v, rows) for rows in self._steps]

    def _prepare(self, keys: Tensor, mask: Tensor | None) -> list[Rows]:
        call, batch = self.call, keys.shape[0]
        starts = [0] * batch if mask is None else _row_starts(mask, call.past + call.queries)
        table = torch.arange(batch, dtype=torch.int32, device=keys.device)[:, None]
        lengths = range(call.past + call.prompt + 1, call.past + call.queries + 1)
        return [
            Rows.on_host(table, starts, [length - start for start in starts], max_len=length) for length in lengths
        ]


def _row_starts(mask: Tensor, length: int) -> list[int]:
    """First visible slot of each row from the last query's mask.

    Raises:
        UnsupportedModelError: for a mask with holes, as right padding leaves.
    """
    visible = mask[:, 0, -1, :length].bool() if mask.dtype == torch.bool else mask[:, 0, -1, :length] == 0
    starts = visible.int().argmax(-1)
    if not torch.equal(visible.sum(-1), length - starts):
        raise UnsupportedModelError(
            "the attention mask has holes; saccade decodes left-padded batches: set tokenizer.padding_side='left'"
        )
    return [int(start) for start in starts.tolist()]
