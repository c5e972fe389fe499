"""One forward pass: which rows vLLM's own kernel serves and which decode under the policy; prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from .batch import Batch
from .sparse import SparseRows
from .step import BuildParent, Part, Written


@dataclass(frozen=True, slots=True, eq=False)
class MixedStep:
    """A `Step` whose rows may have any number of new tokens.

    Attributes:
        same: who answers in all layers.
        dense: metadata of vLLM's own kernel for all rows, which answers in layers whose heads are all dense; None: as
            in the others.
    """

    same: Part
    written: tuple[Written, ...]
    num_actual_tokens: int
    dense: Any | None = None

    def part(self, layer: int) -> Part:
        sparse = self.same.sparse
        if self.dense is None or sparse is None or not sparse.state.plan.roles.passive[layer]:
            return self.same
        sparse.state.passed(layer, sparse.rows)
        return Part(self.dense, None, None)


def prepare(rows: SparseRows, common: Any, build_parent: BuildParent) -> MixedStep:
    """Split a step's rows."""
    batch, table, lengths = rows.batch(common), common.block_table_tensor, common.seq_lens
    sparse = rows.chosen(batch)
    serving = rows.serving
    # Before the first page is bounded there is no index to search.
    searched = () if serving.filled and serving.indexes.layers else sparse
    written = written_in(common, batch, serving.page, searched)
    total = common.num_actual_tokens
    if not sparse:
        return MixedStep(
            Part(build_parent(common, False), None, rows.of(batch, [], table, lengths, None)), written, total
        )
    # What captured steps leave to vLLM's kernel is left to it here: ours was not compiled.
    dense = build_parent(common, True) if rows.leaves_layers else None
    if len(sparse) == common.num_reqs:
        found = rows.of(batch, sparse, table[: len(sparse)], lengths[: len(sparse)], None)
        return MixedStep(Part(None, None, found), written, total, dense)
    chosen = async_tensor_h2d(sparse, table.device, torch.int64)
    tokens = _together(common, sparse)
    if tokens is None:
        tokens = common.query_start_loc[:-1].index_select(0, chosen).long()
    found = rows.of(batch, sparse, table.index_select(0, chosen), lengths.index_select(0, chosen), tokens)
    gone = set(sparse)
    # The rows with new tokens that vLLM's own kernel serves; rows without any pad a batch.
    rest = [row for row, queries in enumerate(batch.queries) if queries and row not in gone]
    if not rest:
        return MixedStep(Part(None, None, found), written, total, dense)
    others, rest_tokens = _only(common, batch, rest)
    return MixedStep(Part(build_parent(others, False), rest_tokens, found), written, total, dense)


def written_in(common: Any, batch: Batch, page: int | None, searched: Sequence[int] = ()) -> tuple[Written, ...]:
    """What a step writes into pages whose bounds cannot wait; `page` None: there are none.

    On the host, which knows how long rows are, one new token waits until it fills its page, unless the row is among
    those in which the very page that it lies in is `searched`: who recomputes a page reads all of it. Rows that pad a
    captured graph have no tokens, and nothing of them is read.
    """
    if page is None:
        return ()
    waits = common.block_table_tensor.is_cpu
    rows = enumerate(zip(batch.queries, batch.lengths, strict=True))
    single = [
        row for row, (queries, length) in rows if queries == 1 and not (waits and length % page and row not in searched)
    ]
    several = [row for row, queries in enumerate(batch.queries) if queries > 1]
    parts = ((single, 1), (several, common.max_query_len))
    return tuple(_written_by(common, batch, rows, count) for rows, count in parts if rows)


def _written_by(common: Any, batch: Batch, rows: list[int], count: int) -> Written:
    table, lengths = common.block_table_tensor, common.seq_lens
    queries = common.query_start_loc[1:] - common.query_start_loc[:-1]
    if len(rows) == common.num_reqs:
        table, lengths, queries = (tensor[: len(rows)] for tensor in (table, lengths, queries))
    else:
        chosen = async_tensor_h2d(rows, table.device, torch.int64)
        table, lengths, queries = (tensor.index_select(0, chosen) for tensor in (table, lengths, queries))
    longest = None if table.is_cpu else common.max_seq_len
    return Written(batch.rows(rows, table, lengths, longest=longest), lengths - queries, count)


def _together(common: Any, rows: list[int]) -> slice | None:
    """The tokens of ascending rows, where these follow each other, as vLLM sorts its batches; None: they do not.

    Layers read and write them where they are then, and copy no prompt.
    """
    starts = common.query_start_loc_cpu
    return slice(int(starts[rows[0]]), int(starts[rows[-1] + 1])) if rows[-1] - rows[0] < len(rows) else None


def _only(common: Any, batch: Batch, rest: list[int]) -> tuple[Any, Tensor | slice]:
    """The metadata of some rows, as of a batch of their own, and where their tokens lie in the flat batch."""
    device = common.block_table_tensor.device
    edges = [0, *accumulate(batch.queries[row] for row in rest)]
    chosen = async_tensor_h2d(rest, device, torch.int64)
    tokens: Tensor | slice | None = _together(common, rest)
    if tokens is None:
        starts = common.query_start_loc_cpu.tolist()
        positions = [position for row in rest for position in range(starts[row], starts[row + 1])]
        tokens = async_tensor_h2d(positions, device, torch.int64)
    edges_cpu = torch.tensor(edges, dtype=common.query_start_loc_cpu.dtype, device="cpu")
    upper = common.seq_lens_cpu_upper_bound
    others = common.replace(
        query_start_loc=async_tensor_h2d(edges_cpu, device),
        query_start_loc_cpu=edges_cpu,
        seq_lens=common.seq_lens.index_select(0, chosen),
        num_reqs=len(rest),
        num_actual_tokens=edges[-1],
        max_query_len=max(batch.queries[row] for row in rest),
        max_seq_len=max(batch.lengths[row] for row in rest),
        block_table_tensor=common.block_table_tensor.index_select(0, chosen),
        slot_mapping=common.slot_mapping[tokens],
        is_prefilling=common.is_prefilling[rest],
        seq_lens_cpu_upper_bound=None if upper is None else upper[rest],
        req_idx=None if common.req_idx is None else common.req_idx[rest],
        positions=None if common.positions is None else common.positions[tokens],
        logits_indices_padded=None,
        num_logits_indices=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    return others, tokens
