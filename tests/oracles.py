"""What the papers say, head by head in float64: plain, and sharing no code with the package.

Everything here speaks of one batch row in logical positions. A vector is a list or an array of floats,
`keys[head][position]` a vector of a KV head; query head `h` belongs to KV head `h // (query heads / KV heads)`.
"""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

Vector = Sequence[float]
Heads = Sequence[Sequence[Vector]]


def dot(left: Vector, right: Vector) -> float:
    assert len(left) == len(right)
    return math.fsum(map(mul, left, right))


def raw_scores(queries: Sequence[Vector], keys: Heads, pooling: str) -> list[list[float]]:
    """Unscaled q·k per group and position: "max" over a group's query heads, of its "mean" query, or "each"."""
    pooled: list[list[float]] = []
    for own, head_keys in zip(groups(queries, len(keys), pooling), keys, strict=True):
        each = own @ np.asarray(head_keys).T
        pooled.extend((each.max(0, keepdims=True) if pooling == "max" else each).tolist())
    return pooled


def groups(queries: Sequence[Vector], kv_heads: int, pooling: str) -> np.ndarray:
    """The queries of each KV head, `[Hkv, group, d]`, or their mean alone."""
    own = np.asarray(queries).reshape(kv_heads, len(queries) // kv_heads, -1)
    return own.mean(1, keepdims=True) if pooling == "mean" else own


def capped(logits: np.ndarray, cap: float | None) -> np.ndarray:
    """Gemma 2's soft-cap of scaled scores."""
    return logits if cap is None else cap * np.tanh(logits / cap)


def weights(
    query: Vector, keys: Sequence[Vector], chosen: Sequence[int], scale: float, cap: float | None = None
) -> np.ndarray:
    """Softmax over the chosen positions."""
    logits = capped(scale * (np.asarray(keys)[chosen] @ np.asarray(query)), cap)
    masses = np.exp(logits - logits.max())
    return masses / masses.sum()


def attention(
    queries: Sequence[Vector],
    keys: Heads,
    values: Heads,
    chosen: Sequence[Sequence[int]],
    scale: float,
    cap: float | None = None,
) -> list[list[float]]:
    """Attention output per query head, over the positions chosen for that query head."""
    group = len(queries) // len(keys)
    return [
        (
            weights(query, keys[head // group], chosen[head], scale, cap)
            @ np.asarray(values[head // group])[chosen[head]]
        ).tolist()
        for head, query in enumerate(queries)
    ]


def hybrid_sets(
    dense: Sequence[bool], chosen: Sequence[Sequence[int]], length: int, query_heads: int
) -> list[list[int]]:
    """Positions per query head: all of them under a dense KV head, else its set's (LycheeDecode, appendix C)."""
    group = query_heads // len(dense)
    return [list(range(length)) if dense[head // group] else list(chosen[head]) for head in range(query_heads)]


def topk(scores: Sequence[float], length: int, k: int) -> list[int]:
    """Positions of the k best among the first `length`, best first; ties to the lower position."""
    ordered: list[int] = np.argsort(-np.asarray(scores[:length]), kind="stable")[:k].tolist()
    return ordered


def rank_union(ranked: Sequence[Sequence[int]], limit: int) -> list[int]:
    """All heads' first choice, then all second choices, ...; the first `limit` distinct ones (LessIsMore)."""
    found: dict[int, None] = {}  # in order
    for rank in range(max(len(choices) for choices in ranked)):
        for choices in ranked:
            if rank < len(choices) and len(found) < limit:
                found[choices[rank]] = None
    return list(found)


def unit_tokens(units: Sequence[int], unit: int, length: int) -> list[int]:
    """Positions below `length` that lie in the chosen units of `unit` tokens."""
    return [token for number in units for token in range(number * unit, (number + 1) * unit) if token < length]


def page_bounds(keys: Sequence[Vector], page: int) -> list[tuple[list[float], list[float]]]:
    """Elementwise minimum and maximum of each page of one head's keys; the last page may be partial."""
    pages = [np.asarray(keys[first : first + page]) for first in range(0, len(keys), page)]
    return [(held.min(0).tolist(), held.max(0).tolist()) for held in pages]


def page_scores(queries: Sequence[Vector], keys: Heads, page: int, pooling: str) -> list[list[float]]:
    """Σ_j max(q_j·min_j, q_j·max_j) per group and page (Quest; ReSA, section 2.1)."""
    pooled: list[list[float]] = []
    for own, head_keys in zip(groups(queries, len(keys), pooling), keys, strict=True):
        low, high = (np.array(side) for side in zip(*page_bounds(head_keys, page), strict=True))
        each = np.array([np.maximum(query * low, query * high).sum(-1) for query in own])
        pooled.extend((each.max(0, keepdims=True) if pooling == "max" else each).tolist())
    return pooled
