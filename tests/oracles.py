"""What the papers say, as naive loops in float64: slow, plain, and sharing no code with the package.

Everything here speaks of one batch row in logical positions. A vector is a list of floats, `keys[head][position]` a
vector of a KV head; query head `h` belongs to KV head `h // (query heads / KV heads)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Vector = Sequence[float]
Heads = Sequence[Sequence[Vector]]


def dot(left: Vector, right: Vector) -> float:
    assert len(left) == len(right)
    return math.fsum(map(mul, left, right))


def mean_vector(vectors: Sequence[Vector]) -> list[float]:
    return [math.fsum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def raw_scores(queries: Sequence[Vector], keys: Heads, pooling: str) -> list[list[float]]:
    """Unscaled q·k per group and position: "max" over a group's query heads, of its "mean" query, or "each"."""
    group = len(queries) // len(keys)
    pooled: list[list[float]] = []
    for head, head_keys in enumerate(keys):
        own: Sequence[Vector] = queries[head * group : (head + 1) * group]
        own = [mean_vector(own)] if pooling == "mean" else own
        each = [[dot(query, key) for key in head_keys] for query in own]
        pooled.extend([[max(column) for column in zip(*each, strict=True)]] if pooling == "max" else each)
    return pooled


def capped(logit: float, cap: float | None) -> float:
    """Gemma 2's soft-cap of a scaled score."""
    return logit if cap is None else cap * math.tanh(logit / cap)


def weights(
    query: Vector, keys: Sequence[Vector], chosen: Sequence[int], scale: float, cap: float | None = None
) -> list[float]:
    """Softmax over the chosen positions."""
    logits = [capped(scale * dot(query, keys[position]), cap) for position in chosen]
    peak = max(logits)
    masses = [math.exp(logit - peak) for logit in logits]
    total = math.fsum(masses)
    return [mass / total for mass in masses]


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
    out = []
    for head, query in enumerate(queries):
        masses = weights(query, keys[head // group], chosen[head], scale, cap)
        rows = [values[head // group][position] for position in chosen[head]]
        out.append([dot(masses, column) for column in zip(*rows, strict=True)])
    return out


def hybrid_sets(
    dense: Sequence[bool], chosen: Sequence[Sequence[int]], length: int, query_heads: int
) -> list[list[int]]:
    """Positions per query head: all of them under a dense KV head, else its set's (LycheeDecode, appendix C)."""
    group = query_heads // len(dense)
    return [list(range(length)) if dense[head // group] else list(chosen[head]) for head in range(query_heads)]


def topk(scores: Sequence[float], length: int, k: int) -> list[int]:
    """Positions of the k best among the first `length`, best first; ties to the lower position."""
    return sorted(range(length), key=lambda position: (-scores[position], position))[:k]


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
    bounds = []
    for first in range(0, len(keys), page):
        columns = list(zip(*keys[first : first + page], strict=True))
        bounds.append(([min(column) for column in columns], [max(column) for column in columns]))
    return bounds


def page_scores(queries: Sequence[Vector], keys: Heads, page: int, pooling: str) -> list[list[float]]:
    """Σ_j max(q_j·min_j, q_j·max_j) per group and page (Quest; ReSA, section 2.1)."""
    group = len(queries) // len(keys)
    pooled: list[list[float]] = []
    for head, head_keys in enumerate(keys):
        own: Sequence[Vector] = queries[head * group : (head + 1) * group]
        bounds = page_bounds(head_keys, page)
        if pooling == "mean":
            own = [mean_vector(own)]
        each = [
            [math.fsum(max(q * low, q * high) for q, low, high in zip(query, *pair, strict=True)) for pair in bounds]
            for query in own
        ]
        pooled.extend(each if pooling == "each" else [[max(column) for column in zip(*each, strict=True)]])
    return pooled
