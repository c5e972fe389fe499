"""One forward pass of a lossless engine's target: vLLM's own kernel serves all rows, drafts to verify among them."""

from typing import Any

import torch
from torch import Tensor

from ....types import Rows
from .mixed_step import written_in
from .sparse import SparseRows
from .step import BuildParent, Step, Written


def prepare(rows: SparseRows, common: Any, build_parent: BuildParent, room: Tensor | None) -> Step:
    """The step that vLLM's `CommonAttentionMetadata` describes; pages are bounded anew where they are written.

    An index in slots takes in what stands for sure. The rows are read on the host only where there is one, or bounds.
    `room`: int32 `[2, rows]`, zeros and what is overwritten, where a graph finds what a step of drafts alone writes.
    """
    serving, page = rows.serving, rows.serving.plan.bounds_page
    serving.attended.begin(False)
    batch = None if rows.slots is None else rows.batch(common)
    if page is None:
        written: tuple[Written, ...] = ()
    elif room is not None and common.max_query_len <= serving.options.drafts + 1:
        written = (_in_place(common, room, rows.config.model_config.max_model_len),)
    else:
        written = written_in(common, batch or rows.batch(common), page)
    return Step(build_parent(common, False), written=written)


def _in_place(common: Any, room: Tensor, longest: int) -> Written:
    """What all rows write, whose numbers the host does not know; those that pad the batch have no tokens."""
    count, edges = common.num_reqs, common.query_start_loc
    (starts, first_new), lengths = room[:, :count], common.seq_lens[:count]
    torch.sub(lengths, edges[1 : count + 1] - edges[:count], out=first_new)
    return Written(Rows(common.block_table_tensor[:count], starts, lengths, longest), first_new, common.max_query_len)
