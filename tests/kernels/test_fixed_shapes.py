"""Reference implementations never look at tensor contents: they run on tensors that have none."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.kernels.chunk_keys.api import chunk_keys
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.kernels.rank_union.api import framed_rank_union
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.kernels.spherical_kmeans.api import member_means, spherical_kmeans
from saccade.kernels.topk.api import topk
from saccade.selection.clusters.plant import ordered_clusters
from saccade.selection.clusters.search import fill_budget
from saccade.types import KVView, Rows, Selection, Softmax


def test_no_reference_synchronises_with_the_host() -> None:
    """`.item()`, `nonzero` and data-dependent shapes raise on a fake tensor."""
    how: Any = {"implementation": "reference"}
    with FakeTensorMode():
        zeros = torch.zeros(2, dtype=torch.int32)
        rows = Rows(zeros[:, None].expand(-1, 3), zeros, zeros + 1, 40)
        kv, q = KVView(torch.empty(6, 16, 2, 8), torch.empty(6, 16, 2, 8), rows), torch.empty(2, 4, 8)
        dense_decode_scores(q, kv, Softmax(0.3), pooling="mean", **how)
        each = decode_scores(q, kv, pooling="each", **how)
        ranked, counts = topk(each, rows.seq_lens, 5, order="score", **how)
        merged = framed_rank_union(ranked, counts, zeros + 40, 7, sinks=0, window=0, universe=40, **how)
        sparse_decode(q, kv, Selection(*merged), Softmax(0.3), **how)
        selection = Selection(torch.zeros(2, 2, 5, dtype=torch.int32), zeros[:, None].expand(-1, 2))
        hybrid_decode(q, kv, selection, (False, True), Softmax(0.3), pooling="each", **how)
        lower, upper = torch.empty(6, 2, 3, 8), torch.empty(6, 2, 3, 8)
        for table, width in ((None, 3), (zeros[:, None].expand(-1, 3), 9)):
            sides = (lower[:2], upper[:2]) if table is None else (lower, upper)
            given: Any = {"page": 16, "table": table, **how}
            update_page_bounds(*sides, kv, start=rows.row_start, count=17, **given)
            assert page_scores(q, *sides, rows.seq_lens, pooling="max", **given)[0].shape == (2, 2, width)
        chunks = torch.zeros(2, 2, 7, dtype=torch.int64)
        ends = {"head": rows.row_start, "tail": rows.row_start}
        assert fill_budget(chunks, chunks, chunks, rows.seq_lens, **ends, budget=9, width=9).ids.shape == (2, 2, 9)
        vectors = torch.empty(2, 9, 8)
        labels, centroids = spherical_kmeans(vectors, 4, counts=zeros, cluster_counts=zeros, **how)
        member_means(vectors, labels, 4, **how)
        parents, lengths = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
        ordered_clusters(vectors, labels, centroids, parents, centroids[:, :3], lengths)


def test_chunk_keys_of_a_device_do_not_synchronise_with_the_host() -> None:
    """What lies on a CPU may be read; `.item()` raises on a tensor without content."""
    zeros = torch.zeros(2, dtype=torch.int32, device="meta")
    storage = torch.empty(6, 16, 2, 8, device="meta")
    kv, edges = KVView(storage, storage, Rows(zeros[:, None].expand(-1, 3), zeros, zeros + 1, 40)), zeros[:, None]
    keys = chunk_keys((kv,), edges.expand(-1, 6), longest=5, implementation="reference")
    assert keys.shape == (1, 2, 2, 5, 8)
    with pytest.raises(RuntimeError, match="meta"):
        edges.max().item()
