"""One forward pass: which rows vLLM's own kernel serves and which decode under the policy; prepared once."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from .batch import Batch, selected
from .sparse import SparseRows
from .step import BuildParent, Step, Written
from .tokens import Tokens, tokens_of


def prepare(rows: SparseRows, common: Any, build_parent: BuildParent) -> Step:
    """Split a step's rows."""
    batch = rows.batch(common)
    sparse = rows.choose(batch)
    serving = rows.serving
    # Before the first page is bounded there is no index to search.
    searched = () if serving.filled and serving.indexes.layers else sparse
    written = written_in(common, batch, serving.plan.bounds_page, searched)
    if not sparse:
        return Step(build_parent(common, False), written=written)
    # What captured steps leave to vLLM's kernel is left to it here: ours was not compiled.
    dense = build_parent(common, True) if rows.leaves_layers else None
    table, lengths = selected(sparse, common.block_table_tensor, common.seq_lens)
    found = rows.of(batch, sparse, table, lengths, tokens_of(common, sparse))
    gone = set(sparse)
    # The rows with new tokens that vLLM's own kernel serves; rows without any pad a batch.
    rest = [row for row, queries in enumerate(batch.queries) if queries and row not in gone]
    if not rest:
        return Step(None, found, written=written, dense=dense)
    tokens = tokens_of(common, rest)
    return Step(build_parent(_only(common, batch, rest, tokens), False), found, tokens, written, dense)


def written_in(common: Any, batch: Batch, page: int | None, searched: Sequence[int] = ()) -> tuple[Written, ...]:
    """What a step writes into pages whose bounds cannot wait; `page` None: there are none.

    On the host, which knows how long rows are, one new token waits until it fills its page, unless the row is among
    those in which the very page that it lies in is `searched`: who recomputes a page reads all of it. Rows that pad a
    captured graph have no tokens, and nothing of them is read.
    """
    if page is None:
        return ()
    waits = common.block_table_tensor.is_cpu
    told = enumerate(zip(batch.queries, batch.lengths, strict=True))
    single = [
        row for row, (queries, length) in told if queries == 1 and not (waits and length % page and row not in searched)
    ]
    several = [row for row, queries in enumerate(batch.queries) if queries > 1]
    written, longest = list[Written](), None if waits else common.max_seq_len
    for rows, count in ((single, 1), (several, common.max_query_len)):
        if rows:
            new = common.query_start_loc[1:] - common.query_start_loc[:-1]
            table, lengths, new = selected(rows, common.block_table_tensor, common.seq_lens, new)
            written.append(Written(batch.rows(rows, table, lengths, longest=longest), lengths - new, count))
    return tuple(written)


def _only(common: Any, batch: Batch, rest: list[int], tokens: Tokens) -> Any:
    """The metadata of some rows, as of a batch of their own, with their tokens."""
    edges = [0, *accumulate(batch.queries[row] for row in rest)]
    table, lengths = selected(rest, common.block_table_tensor, common.seq_lens)
    edges_cpu = torch.tensor(edges, dtype=common.query_start_loc_cpu.dtype, device="cpu")
    upper = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=async_tensor_h2d(edges_cpu, table.device),
        query_start_loc_cpu=edges_cpu,
        seq_lens=lengths,
        num_reqs=len(rest),
        num_actual_tokens=edges[-1],
        max_query_len=max(batch.queries[row] for row in rest),
        max_seq_len=max(batch.lengths[row] for row in rest),
        block_table_tensor=table,
        slot_mapping=tokens.of(common.slot_mapping),
        is_prefilling=common.is_prefilling[rest],
        seq_lens_cpu_upper_bound=None if upper is None else upper[rest],
        req_idx=None if common.req_idx is None else common.req_idx[rest],
        positions=None if common.positions is None else tokens.of(common.positions),
        logits_indices_padded=None,
        num_logits_indices=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
