"""Reference implementations never look at tensor contents: they run on tensors that have none."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.kernels._chunk_sets import fill_budget
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.kernels.rank_union.api import rank_union
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.kernels.spherical_kmeans.api import spherical_kmeans
from saccade.kernels.topk.api import topk
from saccade.selection.clusters.ordered import ordered_clusters
from saccade.types import KVView, Rows, Selection, Softmax


def test_no_reference_synchronises_with_the_host() -> None:
    """`.item()`, `nonzero` and data-dependent shapes raise on a fake tensor."""
    with FakeTensorMode():
        zeros = torch.zeros(2, dtype=torch.int32)
        rows = Rows(zeros[:, None].expand(-1, 3), zeros, zeros + 1, 40)
        kv = KVView(torch.empty(6, 16, 2, 8), torch.empty(6, 16, 2, 8), rows)
        q = torch.empty(2, 4, 8)
        out, scores = dense_decode_scores(q, kv, Softmax(0.3), pooling="mean", implementation="reference")
        assert out.shape == q.shape
        assert scores is not None
        assert scores.shape == (2, 2, 40)
        each = decode_scores(q, kv, pooling="each", implementation="reference")
        assert each.shape == (2, 4, 40)
        ranked, counts = topk(each, rows.seq_lens, 5, order="score", implementation="reference")
        merged, found = rank_union(ranked, counts, 7, universe=40, implementation="reference")
        assert merged.shape == (2, 1, 7)
        chosen = sparse_decode(q, kv, Selection(merged, found), Softmax(0.3), implementation="reference")
        assert chosen.shape == q.shape
        lower, upper = torch.empty(2, 2, 3, 8), torch.empty(2, 2, 3, 8)
        update_page_bounds(lower, upper, kv, page=16, start=rows.row_start, count=17, implementation="reference")
        pages = page_scores(q, lower, upper, rows.seq_lens, page=16, pooling="max", implementation="reference")
        assert pages.shape == (2, 2, 3)
        chunks = torch.zeros(2, 2, 7, dtype=torch.int64)
        ends = {"head": rows.row_start, "tail": rows.row_start}
        assert fill_budget(chunks, chunks, chunks, rows.seq_lens, **ends, budget=9, width=9).ids.shape == (2, 2, 9)
        labels, centroids = spherical_kmeans(
            torch.empty(2, 9, 8), 4, counts=zeros, cluster_counts=zeros, implementation="reference"
        )
        assert labels.shape == (2, 9)
        assert centroids.shape == (2, 4, 8)
        parents, lengths = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
        planted = ordered_clusters(torch.empty(2, 9, 8), labels, centroids, parents, centroids[:, :3], lengths)
        assert planted.members.shape == (2, 9)
        assert planted.unit_radii.shape == (2, 3)
