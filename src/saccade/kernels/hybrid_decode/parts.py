"""Hybrid attention as separate calls, one per run of neighbouring heads that do the same."""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels.dense_decode_scores.api import dense_decode_scores
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.types import Flags, KVView, Pooling, Selection, Softmax


def hybrid_decode(
    q: Tensor,
    kv: KVView,
    selection: Selection,
    dense: Flags,
    softmax: Softmax,
    pooling: Pooling | None,
    scored: Flags,
    implementation: Implementation,
) -> tuple[Tensor, Tensor | None]:
    group = q.shape[1] // kv.kv_heads
    outputs: list[Tensor] = []
    kept: list[Tensor] = []
    for start, stop, attends_to_all, wanted in _runs(dense, scored):
        first, last = start * group, stop * group
        given = q[:, first:last], kv.heads(start, stop)
        if not attends_to_all:
            chosen = selection.heads(start, stop, kv.kv_heads)
            outputs.append(sparse_decode(*given, chosen, softmax.heads(first, last), implementation=implementation))
            continue
        out, scores = dense_decode_scores(
            *given, softmax.heads(first, last), pooling=pooling if wanted else None, implementation=implementation
        )
        outputs.append(out)
        if scores is not None:
            kept.append(scores)
    out = torch.cat(outputs, dim=1)
    if pooling is None:
        return out, None
    return out, torch.cat(kept, dim=1) if kept else q.new_empty((q.shape[0], 0, kv.rows.max_len), dtype=torch.float32)


def _runs(dense: Flags, scored: Flags) -> Iterator[tuple[int, int, bool, bool]]:
    """First head, the one after the last, dense, scored: for each run of heads alike in both."""
    start = 0
    for (attends_to_all, wanted), run in groupby(zip(dense, scored, strict=True)):
        stop = start + len(list(run))
        yield start, stop, attends_to_all, wanted
        start = stop
