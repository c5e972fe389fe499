"""Where the tokens of some rows lie in a step's flat batch: layers read and write them there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Some of a step's tokens: those that follow each other, a slice, and nothing is copied.

    Tokens with others between them are copied there and back: `where` is int64, on the device.
    """

    where: slice | Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Theirs of a tensor `[T, ...]`."""
        return tensor[self.where] if isinstance(self.where, slice) else tensor.index_select(0, self.where)

    def fill(self, output: Tensor, write: Callable[[Tensor], Any]) -> None:
        """Let `write` fill their part of an output `[T, ...]`, all of it."""
        if isinstance(self.where, slice):
            write(output[self.where])
            return
        own = output.new_empty((len(self.where), *output.shape[1:]))
        write(own)
        output.index_copy_(0, self.where, own)


ALL = Tokens(slice(None))


def tokens_of(common: Any, rows: list[int]) -> Tokens:
    """Those of ascending rows of vLLM's `CommonAttentionMetadata`; sorted as its batches are, no prompt is copied."""
    edges = common.query_start_loc_cpu.tolist()
    if rows[-1] - rows[0] < len(rows):
        return Tokens(slice(edges[rows[0]], edges[rows[-1] + 1]))
    places = [place for row in rows for place in range(edges[row], edges[row + 1])]
    return Tokens(async_tensor_h2d(places, common.query_start_loc.device, torch.int64))
