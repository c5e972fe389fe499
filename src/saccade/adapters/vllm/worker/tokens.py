"""Where the tokens of some rows lie in a step's flat batch: layers read and write them there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d


@dataclass(frozen=True, slots=True, eq=False)
class AdjacentTokens:
    """Tokens that follow each other: nothing is copied."""

    where: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Theirs of a tensor `[T, ...]`."""
        return tensor[self.where]

    def fill(self, output: Tensor, write: Callable[[Tensor], Any]) -> None:
        """Let `write` fill their part of an output `[T, ...]`, all of it."""
        write(output[self.where])


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredTokens:
    """Tokens with others between them, copied there and back: `where` is int64, on the device."""

    where: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(0, self.where)

    def fill(self, output: Tensor, write: Callable[[Tensor], Any]) -> None:
        own = output.new_empty((len(self.where), *output.shape[1:]))
        write(own)
        output.index_copy_(0, self.where, own)


Tokens = AdjacentTokens | ScatteredTokens
ALL = AdjacentTokens(slice(None))


def tokens_of(common: Any, rows: list[int]) -> Tokens:
    """Those of ascending rows of vLLM's `CommonAttentionMetadata`; sorted as its batches are, no prompt is copied."""
    edges = common.query_start_loc_cpu.tolist()
    if rows[-1] - rows[0] < len(rows):
        return AdjacentTokens(slice(edges[rows[0]], edges[rows[-1] + 1]))
    places = [place for row in rows for place in range(edges[row], edges[row + 1])]
    return ScatteredTokens(async_tensor_h2d(places, common.query_start_loc.device, torch.int64))
