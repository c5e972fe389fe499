"""A session: one cache under one run. It knows which positions are prompt and where each row starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedModelError
from ...state import DecodeState
from ...types import KVView, Rows


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors made inside may be written in any later call: they belong to no graph and are no inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield


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
        self.state.begin(call.past)

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
        starts = [0] * batch if mask is None else _row_starts(mask, call)
        table = torch.arange(batch, dtype=torch.int32, device=keys.device)[:, None]
        steps = []
        for length in range(call.past + call.prompt + 1, call.past + call.queries + 1):
            # A query that is padding itself has no tokens yet; its own slot keeps it finite.
            first = [min(start, length - 1) for start in starts]
            steps.append(Rows.on_host(table, first, [length - start for start in first], max_len=length))
        return steps


def _row_starts(mask: Tensor, call: Call) -> list[int]:
    """First visible slot of each row, which must see everything from there to the query's own position.

    Raises:
        UnsupportedModelError: for a mask with holes, as right padding leaves, or of another form than causal.
    """
    length = call.past + call.queries
    seen = mask[:, :, call.prompt :, :length]
    visible = seen if seen.dtype == torch.bool else seen == 0
    last = visible[:, 0, -1]
    starts = torch.where(last.any(-1), last.int().argmax(-1), length)
    slots = torch.arange(length, device=mask.device)
    causal = slots <= slots[call.past + call.prompt :, None]
    if not torch.equal(visible, ((slots >= starts[:, None])[:, None] & causal)[:, None].expand_as(visible)):
        raise UnsupportedModelError(
            "the attention mask has holes or is not causal; saccade decodes left-padded batches: "
            "set tokenizer.padding_side='left'"
        )
    return [int(start) for start in starts.tolist()]
