"""One forward pass of one new token per row, as a CUDA graph holds it: all it reads lies where its capture found it."""

from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from ....types import Rows
from .sparse import SparseRows
from .step import BuildParent, Step, Written


class DecodeSteps:
    """Makes the metadata of decoding steps, in the same memory for all of them.

    Args:
        sparse: which rows decode under the policy.
        rows: the most that a batch has, with its padding.
        longest: tokens that a row may have, the bound of buffers and grids; programs leave early by true lengths.
    """

    def __init__(self, sparse: SparseRows, rows: int, longest: int, device: torch.device) -> None:
        self._sparse, self._longest = sparse, longest
        self._starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._whole = torch.zeros(rows, dtype=torch.bool, device=device)
        self._flags = [False] * rows
        sparse.serving.indexes.fills = sparse.serving.filled

    def prepare(self, common: Any, build_parent: BuildParent) -> Step:
        """The metadata of a step from vLLM's `CommonAttentionMetadata`."""
        count, batch = common.num_reqs, self._sparse.batch(common)
        whole = self._sparse.whole(batch)
        # Rows behind these pad the batch, and read nothing whatever they are.
        if self._flags[: len(whole)] != whole:
            self._flags[: len(whole)] = whole
            self._whole[: len(whole)].copy_(async_tensor_h2d(whole, self._whole.device, torch.bool))
        rows = Rows(
            page_table=common.block_table_tensor[:count],
            row_start=self._starts[:count],
            seq_lens=common.seq_lens[:count],
            max_len=self._longest,
            whole=self._whole[:count],
        )
        serving = self._sparse.serving
        written = () if serving.plan.bounds_page is None else (Written(rows, None, int(not serving.filled)),)
        # Where no layer is left to vLLM's kernel, nobody reads its schedule, which takes three launches.
        dense = build_parent(common, not self._sparse.leaves_layers)
        return Step(None, self._sparse.all_of(batch, whole, rows), written=written, dense=dense)
