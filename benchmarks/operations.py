"""The single operations that `python -m benchmarks kernels` times: each on one layer's cache, with what it moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.adapters.hf.huge_pages import long_lived
from saccade.bench.check import compare_attention
from saccade.errors import SaccadeError
from saccade.kernels.dense_decode_scores.api import decode_scores, dense_decode_scores
from saccade.kernels.page_bounds.api import page_scores, update_page_bounds
from saccade.kernels.sparse_decode.api import sparse_decode
from saccade.kernels.topk.api import topk
from saccade.selection.rules.rank_union import RankUnion
from saccade.selection.rules.top_k import TopK
from saccade.types import KVView, ModelShape, Rows, Selection, Softmax

PAGE = 16


@dataclass(frozen=True)
class Layer:
    """One layer's cache and query, with what operations on it start from.

    Attributes:
        q: `[B, Hq, d]`.
        scores: float32 `[B, Hkv, T]`, of the layer's keys.
        lower, upper: page bounds `[B, Hkv, P, d]`.
        tokens, pages: sets of the budget.
    """

    q: Tensor
    kv: KVView
    scores: Tensor
    lower: Tensor
    upper: Tensor
    tokens: Selection
    pages: Selection

    @classmethod
    def random(
        cls,
        shape: ModelShape,
        context: int,
        batch: int,
        budget: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> Layer:
        generator = torch.Generator(device).manual_seed(seed)

        like = torch.empty(0, dtype=dtype, device=device)

        def draw(*size: int) -> Tensor:
            return long_lived(size, like).normal_(generator=generator)

        size = (batch, shape.kv_heads, context, shape.head_dim)
        k, v, q = draw(*size), draw(*size), draw(batch, shape.query_heads, shape.head_dim)
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        rows = Rows.on_host(table, [0] * batch, [context] * batch)
        kv = KVView(k.transpose(1, 2), v.transpose(1, 2), rows)
        lower, upper = (k.new_empty(batch, shape.kv_heads, -(-context // PAGE), shape.head_dim) for _ in range(2))
        update_page_bounds(lower, upper, kv, page=PAGE, start=torch.zeros_like(rows.seq_lens), count=context)
        scores = decode_scores(q, kv, pooling="max")
        pages, _ = page_scores(q, lower, upper, rows.seq_lens, page=PAGE, pooling="max")
        rule, scale = TopK(budget), shape.head_dim**-0.5
        return cls(
            *(q, kv, scores, lower, upper),
            tokens=rule.choose(scores, rows, 1, scale),
            pages=rule.choose(pages, rows, PAGE, scale),
        )


@dataclass(frozen=True)
class Operation:
    """What is timed.

    Attributes:
        run: the call, on a layer and for an implementation; implementations are those of the operation's api.
        moved: bytes that it must read and write, from a layer.
        check: compares a result with plain arithmetic in float64; raises SaccadeError.
        kernel: whether it is one kernel, so that an implementation can be named; else "auto" runs.
    """

    name: str
    run: Callable[[Layer, Any], Any]
    moved: Callable[[Layer], int]
    check: Callable[[Layer, Any], None]
    kernel: bool = True


def _softmax(layer: Layer) -> Softmax:
    return Softmax(1 / math.sqrt(layer.q.shape[2]))


def _cache_bytes(layer: Layer, tokens: float) -> int:
    """Keys and values of so many tokens of every row and KV head."""
    return int(2 * tokens * layer.kv.rows.batch * layer.kv.kv_heads * layer.kv.head_dim * layer.kv.k.itemsize)


def _context(layer: Layer) -> int:
    return layer.kv.rows.max_len


def _check_dense(layer: Layer, result: Any) -> None:
    output, scores = result
    compare_attention("dense attention", output, layer.q, layer.kv, None, None, _softmax(layer))
    if scores is not None:
        _check_scores(layer, scores)


def _check_scores(layer: Layer, scores: Tensor) -> None:
    """Row 0, first KV head."""
    group = layer.q.shape[1] // layer.kv.kv_heads
    keys = layer.kv.k[0, : _context(layer), 0].double()
    products = keys @ layer.q[0, :group].double().T
    budget = float((keys.abs() @ layer.q[0, :group].double().abs().T).max()) * (layer.q.shape[2] + 1) * 2.0**-24
    _expect("scores", float((scores[0, 0].double() - products.amax(dim=1)).abs().max()), budget)


def _check_sparse(layer: Layer, selection: Selection) -> Callable[[Tensor], None]:
    def check(output: Tensor) -> None:
        compare_attention("sparse attention", output, layer.q, layer.kv, selection, None, _softmax(layer))

    return check


def _check_topk(layer: Layer, result: Any) -> None:
    """Row 0, first KV head: as a stable sort of all scores has it."""
    ids, count = result[0][0, 0], int(result[1][0, 0])
    order = layer.scores[0, 0].sort(descending=True, stable=True).indices[:count].sort().values
    _expect("top-k", float((ids[:count].long() != order).sum()), 0)


def _check_pages(layer: Layer, scores: Tensor) -> None:
    queries = layer.q[0, : layer.q.shape[1] // layer.kv.kv_heads].double()[:, None]
    lower, upper = layer.lower[0, 0].double(), layer.upper[0, 0].double()
    wanted = torch.maximum(queries * lower, queries * upper).sum(-1).amax(0)
    size = float((queries.abs() * torch.maximum(lower.abs(), upper.abs())).sum(-1).max())
    _expect("page scores", float((scores[0, 0].double() - wanted).abs().max()), size * 2 * layer.q.shape[2] * 2.0**-24)


def _check_bounds(layer: Layer, _: Any) -> None:
    last = (_context(layer) - 1) // PAGE
    keys = layer.kv.k[0, last * PAGE : _context(layer), 0]
    wrong = (layer.lower[0, 0, last] != keys.amin(0)) | (layer.upper[0, 0, last] != keys.amax(0))
    _expect("page bounds", float(wrong.sum()), 0)


def _check_nothing(_: Layer, result: Any) -> None:
    """Made of operations that are checked by themselves; a set must at least be one."""
    ids, count = result.ids[0, 0], int(result.counts[0, 0])
    _expect("a set's order", float((ids[:count].diff() <= 0).sum()), 0)


def _expect(what: str, error: float, budget: float) -> None:
    if not error <= budget:
        raise SaccadeError(f"{what} differ from float64 by {error:.2e} (budget {budget:.2e}); nothing is timed")


def _select_exact(layer: Layer, _: Any) -> Selection:
    """What a TidalDecode layer does that re-selects, attention included."""
    _, scores = dense_decode_scores(layer.q, layer.kv, _softmax(layer), pooling="max")
    assert scores is not None
    return TopK(layer.tokens.ids.shape[2]).choose(scores, layer.kv.rows, 1, _softmax(layer).scale)


def _select_union(layer: Layer, _: Any) -> Selection:
    """The same for LessIsMore: one set for all heads from every query head's ranking."""
    _, scores = dense_decode_scores(layer.q, layer.kv, _softmax(layer), pooling="each")
    assert scores is not None
    return RankUnion(layer.tokens.ids.shape[2], 4, 0.25).choose(scores, layer.kv.rows, 1, _softmax(layer).scale)


def _select_pages(layer: Layer, _: Any) -> Selection:
    """What a Quest layer does before it attends."""
    scores, _ = page_scores(layer.q, layer.lower, layer.upper, layer.kv.rows.seq_lens, page=PAGE, pooling="max")
    return TopK(layer.tokens.ids.shape[2]).choose(scores, layer.kv.rows, PAGE, _softmax(layer).scale)


def _update(layer: Layer, implementation: Any) -> None:
    """One new token."""
    start = layer.kv.rows.seq_lens - 1
    update_page_bounds(
        layer.lower, layer.upper, layer.kv, page=PAGE, start=start, count=1, implementation=implementation
    )


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "dense",
        lambda layer, chosen: dense_decode_scores(layer.q, layer.kv, _softmax(layer), implementation=chosen),
        lambda layer: _cache_bytes(layer, _context(layer)),
        _check_dense,
    ),
    Operation(
        "dense+scores",
        lambda layer, chosen: dense_decode_scores(
            layer.q, layer.kv, _softmax(layer), pooling="max", implementation=chosen
        ),
        lambda layer: _cache_bytes(layer, _context(layer)) + layer.scores.nbytes,
        _check_dense,
    ),
    Operation(
        "scores",
        lambda layer, chosen: decode_scores(layer.q, layer.kv, pooling="max", implementation=chosen),
        lambda layer: _cache_bytes(layer, _context(layer)) // 2 + layer.scores.nbytes,
        _check_scores,
    ),
    Operation(
        "sparse tokens",
        lambda layer, chosen: sparse_decode(layer.q, layer.kv, layer.tokens, _softmax(layer), implementation=chosen),
        lambda layer: _cache_bytes(layer, layer.tokens.ids.shape[2]),
        lambda layer, result: _check_sparse(layer, layer.tokens)(result),
    ),
    Operation(
        "sparse pages",
        lambda layer, chosen: sparse_decode(layer.q, layer.kv, layer.pages, _softmax(layer), implementation=chosen),
        lambda layer: _cache_bytes(layer, layer.pages.ids.shape[2] * PAGE),
        lambda layer, result: _check_sparse(layer, layer.pages)(result),
    ),
    Operation(
        "top-k",
        lambda layer, chosen: topk(
            layer.scores, layer.kv.rows.seq_lens, layer.tokens.ids.shape[2], implementation=chosen
        ),
        lambda layer: layer.scores.nbytes,
        _check_topk,
    ),
    Operation(
        "page scores",
        lambda layer, chosen: page_scores(
            *(layer.q, layer.lower, layer.upper, layer.kv.rows.seq_lens),
            page=PAGE,
            pooling="max",
            implementation=chosen,
        )[0],
        lambda layer: layer.lower.nbytes + layer.upper.nbytes,
        _check_pages,
    ),
    Operation("page update", _update, lambda layer: _cache_bytes(layer, PAGE) // 2, _check_bounds),
    Operation(
        "tidal layer",
        _select_exact,
        lambda layer: _cache_bytes(layer, _context(layer)) + 2 * layer.scores.nbytes,
        _check_nothing,
        kernel=False,
    ),
    Operation(
        "less_is_more layer",
        _select_union,
        lambda layer: (
            _cache_bytes(layer, _context(layer)) + 2 * layer.scores.nbytes * layer.q.shape[1] // layer.kv.kv_heads
        ),
        _check_nothing,
        kernel=False,
    ),
    Operation(
        "quest selection",
        _select_pages,
        lambda layer: layer.lower.nbytes + layer.upper.nbytes,
        _check_nothing,
        kernel=False,
    ),
)
