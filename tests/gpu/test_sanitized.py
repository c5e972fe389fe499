"""One small call of every kernel, for `compute-sanitizer`: few, as it is slow; other tests look at the results."""

import pytest
import torch
from torch import Tensor

from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.hybrid_decode.api import hybrid_decode
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.kernels.rank_union.api import framed_rank_union
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.kernels.spherical_kmeans.api import member_means, spherical_kmeans
from saccade.kernels.topk.api import topk
from saccade.types import KVView, Rows, Selection, Softmax

BATCH, QUERY_HEADS, KV_HEADS, DIM, PAGE = 2, 8, 2, 64, 16
LENGTHS = (131, 77)
SCALE = DIM**-0.5


@pytest.fixture
def kv() -> KVView:
    """Pages that lie right at the end of their memory: a read beyond the last token is a read beyond the allocation."""
    pages = -(-max(LENGTHS) // PAGE)
    shape = (BATCH * pages, PAGE, KV_HEADS, DIM)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.arange(BATCH * pages, dtype=torch.int32, device="cuda").flip(0).view(BATCH, pages)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    return KVView(k, v, Rows(table, torch.zeros_like(lengths), lengths, max(LENGTHS)))


@pytest.fixture
def q() -> Tensor:
    return torch.randn((BATCH, QUERY_HEADS, DIM), dtype=torch.bfloat16, device="cuda")


def chosen(groups: int, unit: int) -> Selection:
    """Sets that hold each row's last unit, and slots behind the count."""
    ids = torch.full((BATCH, groups, 7), -1, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        last = (length - 1) // unit
        ids[row, :, :3] = torch.tensor([0, last // 2, last])
    return Selection(ids.cuda(), torch.full((BATCH, groups), 3, dtype=torch.int32, device="cuda"), unit)


@pytest.mark.parametrize("pooling", [None, "max", "each"])
def test_dense(kv: KVView, q: Tensor, pooling: str | None) -> None:
    output, _ = dense_decode_scores(q, kv, Softmax(SCALE), pooling=pooling, implementation="triton")  # type: ignore[arg-type]
    assert output.isfinite().all()


@pytest.mark.parametrize(("groups", "unit"), [(1, 1), (KV_HEADS, 1), (QUERY_HEADS, 1), (KV_HEADS, PAGE)])
def test_sparse(kv: KVView, q: Tensor, groups: int, unit: int) -> None:
    assert sparse_decode(q, kv, chosen(groups, unit), Softmax(SCALE), implementation="triton").isfinite().all()


def test_hybrid(kv: KVView, q: Tensor) -> None:
    output, _ = hybrid_decode(q, kv, chosen(KV_HEADS, 1), (True, False), Softmax(SCALE), implementation="triton")
    assert output.isfinite().all()


@pytest.mark.parametrize("order", ["position", "score"])
def test_topk_and_union(kv: KVView, order: str) -> None:
    scores = torch.randn((BATCH, QUERY_HEADS, max(LENGTHS)), device="cuda")
    ids, counts = topk(scores, kv.rows.seq_lens, 9, order=order, implementation="triton")  # type: ignore[arg-type]
    assert int(counts.min()) == 9
    frame = {"sinks": 2, "window": 3, "universe": max(LENGTHS)}
    union, _ = framed_rank_union(ids, counts, kv.rows.seq_lens, 12, **frame, implementation="triton")
    assert union.shape == (BATCH, 1, 17)


def test_bounds(kv: KVView, q: Tensor) -> None:
    pages = -(-max(LENGTHS) // PAGE)
    lower = torch.zeros((BATCH, KV_HEADS, pages, DIM), dtype=torch.bfloat16, device="cuda")
    upper, start = torch.zeros_like(lower), torch.zeros_like(kv.rows.seq_lens)
    options = {"page": PAGE, "implementation": "triton"}
    update_page_bounds(lower, upper, kv, start=start, count=max(LENGTHS), **options)  # type: ignore[arg-type]
    update_page_bounds(lower, upper, kv, start=kv.rows.seq_lens - 1, count=1, **options)  # type: ignore[arg-type]
    for filling in (None, kv):
        scores, _ = page_scores(q, lower, upper, kv.rows.seq_lens, pooling="max", filling=filling, **options)  # type: ignore[arg-type]
    assert scores[0].isfinite().all()


def test_clusters() -> None:
    vectors = torch.randn((3, 77, DIM), device="cuda")
    labels, _ = spherical_kmeans(vectors, 9, iterations=2, implementation="triton")
    assert int(member_means(vectors, labels, 9, implementation="triton")[2].min()) > 0
