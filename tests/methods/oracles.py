"""Policy oracles: naive float64 loops, written from the papers and docs/policies.md; nothing of the package is used.

A step is one new token of one sequence. ``q[l]`` is ``[Hq, d]``, ``k[l]`` and ``v[l]`` are ``[Hkv, T, d]`` with the
current token last. A "set" is the sorted list of the logical positions that one query head attends to.
Every function returns ``sets[layer][query head]``; `outputs` turns sets into attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Sets = list[list[list[int]]]  # [layer][query head] -> positions, ascending
Array = np.ndarray


def token_scores(q: Array, k: Array) -> list[list[float]]:
    """``q . k`` per query head and position."""
    group = q.shape[0] // k.shape[0]
    return [[float(score) for score in k[h // group] @ q[h]] for h in range(q.shape[0])]


def over_group(scores: list[list[float]], group: int, heads: str) -> list[list[float]]:
    """The score lists of the selecting heads: as they are, or the maximum over each KV group."""
    if heads == "query":
        return scores
    return [[max(column) for column in zip(*scores[i : i + group], strict=True)] for i in range(0, len(scores), group)]


def best(scores: Sequence[float], candidates: Sequence[int], count: int) -> list[int]:
    """The `count` candidates of highest score, best first, ties to the lower index."""
    return sorted(candidates, key=lambda i: (-scores[i], i))[:count]


def everything(q: Array, k: Array) -> list[list[int]]:
    return [list(range(k.shape[1])) for _ in range(q.shape[0])]


# --- the policies -----------------------------------------------------------------------------------------------


def dense(q: list[Array], k: list[Array]) -> Sets:
    return [everything(a, b) for a, b in zip(q, k, strict=True)]


def streaming(q: list[Array], k: list[Array], *, budget: int, sinks: int = 4, dense_layers: int = 0) -> Sets:
    sets = dense(q, k)
    length = k[0].shape[1]
    if length <= budget:
        return sets
    window = sorted({*range(sinks), *range(length - (budget - sinks), length)})
    return [s if layer < dense_layers else [list(window) for _ in s] for layer, s in enumerate(sets)]


def quest(
    q: list[Array], k: list[Array], *, budget: int, page: int = 16, dense_layers: int = 2, heads: str = "kv"
) -> Sets:
    sets = dense(q, k)
    if k[0].shape[1] > budget:
        for layer in range(dense_layers, len(q)):
            sets[layer] = top_pages(q[layer], k[layer], budget, page, heads)
    return sets


def top_pages(q: Array, k: Array, budget: int, page: int, heads: str) -> list[list[int]]:
    """The current token's page and the best others, floor(budget / page) in all."""
    length, group = k.shape[1], q.shape[0] // k.shape[0]
    last = math.ceil(length / page) - 1
    chosen = []
    for row in over_group(page_scores(q, k, page), group, heads):
        keep = [last, *best(row, range(last), budget // page - 1)]
        chosen.append(sorted(t for p in keep for t in range(p * page, min((p + 1) * page, length))))
    return [chosen[h if heads == "query" else h // group] for h in range(q.shape[0])]


def page_scores(q: Array, k: Array, page: int) -> list[list[float]]:
    """Per query head and page, the largest ``q . x`` of any x between the page's elementwise bounds (Quest, ReSA)."""
    group = q.shape[0] // k.shape[0]
    scores = []
    for h in range(q.shape[0]):
        row = []
        for start in range(0, k.shape[1], page):
            keys = k[h // group][start : start + page]
            row.append(float(np.maximum(q[h] * keys.min(axis=0), q[h] * keys.max(axis=0)).sum()))
        scores.append(row)
    return scores


def _persistent(
    q: list[Array],
    k: list[Array],
    choose: Callable[[int], list[list[int]]],
    dense_layers: int,
    reselect: Sequence[int],
    budget: int,
) -> Sets:
    """Layers 0 .. dense_layers-1 dense; the next layer and `reselect` dense and choosing; all others reuse."""
    sets = dense(q, k)
    if k[0].shape[1] <= budget:
        return sets
    chosen: list[list[int]] = []
    for layer in range(dense_layers, len(q)):
        if layer == dense_layers or layer in reselect:
            chosen = choose(layer)  # this layer itself attends to everything
        else:
            sets[layer] = [list(s) for s in chosen]
    return sets


def tidal(
    q: list[Array],
    k: list[Array],
    *,
    budget: int,
    reselect: Sequence[int] = (),
    dense_layers: int = 2,
    heads: str = "kv",
) -> Sets:
    def choose(layer: int) -> list[list[int]]:
        return top_tokens(q[layer], k[layer], budget, heads)

    return _persistent(q, k, choose, dense_layers, reselect, budget)


def top_tokens(q: Array, k: Array, budget: int, heads: str) -> list[list[int]]:
    """The current token and the budget - 1 best others."""
    length, group = k.shape[1], q.shape[0] // k.shape[0]
    rows = over_group(token_scores(q, k), group, heads)
    chosen = [sorted([length - 1, *best(row, range(length - 1), budget - 1)]) for row in rows]
    return [chosen[h if heads == "query" else h // group] for h in range(q.shape[0])]


def less_is_more(
    q: list[Array],
    k: list[Array],
    *,
    budget: int,
    reselect: Sequence[int] = (),
    dense_layers: int = 2,
    sinks: int = 4,
    recent: float = 0.25,
) -> Sets:
    def choose(layer: int) -> list[list[int]]:
        length = k[layer].shape[1]
        # The share is a decimal number: 0.29 of 100 is 29, whatever binary makes of it.
        reserved = max(math.floor(budget * recent + 1e-9), sinks + 1)
        wanted = budget - reserved
        first_recent = length - (reserved - sinks)
        kept = [*range(sinks), *range(first_recent, length)]
        candidates = range(sinks, first_recent)
        lists = [best(row, candidates, wanted) for row in token_scores(q[layer], k[layer])]
        union: list[int] = []
        for rank in range(wanted):
            for ranked in lists:  # ties of rank by head index
                if len(union) < wanted and rank < len(ranked) and ranked[rank] not in union:
                    union.append(ranked[rank])
        one = sorted(kept + union)
        return [list(one) for _ in range(q[layer].shape[0])]

    return _persistent(q, k, choose, dense_layers, reselect, budget)


# --- attention over given sets, and what is measured -------------------------------------------------------------


def weights(q: Array, k: Array, positions: Sequence[int], scale: float) -> Array:
    """Softmax over `positions` of one query head."""
    logits = k[list(positions)] @ q * scale
    e = np.exp(logits - logits.max())
    return e / e.sum()


def outputs(q: Array, k: Array, v: Array, sets: list[list[int]], scale: float) -> Array:
    """``[Hq, d]``: each query head over its own set."""
    group = q.shape[0] // k.shape[0]
    out = np.zeros((q.shape[0], v.shape[-1]))
    for h, positions in enumerate(sets):
        out[h] = weights(q[h], k[h // group], positions, scale) @ v[h // group, positions]
    return out


def attention_recall(q: Array, k: Array, sets: list[list[int]], scale: float) -> list[float]:
    """The dense softmax mass that falls on the set, per query head (LessIsMore eq. 3)."""
    group = q.shape[0] // k.shape[0]
    every = range(k.shape[1])
    return [float(weights(q[h], k[h // group], every, scale)[s].sum()) for h, s in enumerate(sets)]


def token_recall(q: Array, k: Array, sets: list[list[int]], count: int) -> list[float]:
    """The share of dense's own top `count` tokens that lies in the set, per query head (Tidal fig. 2b)."""
    rows = token_scores(q, k)
    every = range(k.shape[1])
    result = []
    for h, s in enumerate(sets):
        top = best(rows[h], every, count)
        result.append(len(set(top) & set(s)) / len(top))
    return result


def share_attended(sets: Sets, length: int) -> float:
    """Mean over all layers and heads of the share of the cache that is attended."""
    shares = [len(s) / length for layer in sets for s in layer]
    return sum(shares) / len(shares)
