"""Policy oracles: naive float64 loops, written from the papers and docs/policies.md; nothing of the package is used.

Every policy gives ``sets[layer][query head]``; `outputs` turns sets into attention.
"""

import math
from collections.abc import Sequence

import numpy as np

from oracles import attention, rank_union, raw_scores, weights

from .oracles_composed import Array, Cut, Sets, always, best, by_roles, composed, dense, persistent, top_k, unit_scores
from .oracles_composed import everything as everything

# --- the policies -----------------------------------------------------------------------------------------------


def streaming(q: list[Array], k: list[Array], *, budget: int, sinks: int = 4, dense_layers: int = 0) -> Sets:
    sets = dense(q, k)
    length = k[0].shape[1]
    if length <= budget:
        return sets
    window = sorted({*range(sinks), *range(length - (budget - sinks), length)})
    return [s if layer < dense_layers else [list(window) for _ in s] for layer, s in enumerate(sets)]


def quest(
    q: list[Array], k: list[Array], *, budget: int, page: int = 16, dense_layers: int = 2, heads: str = "kv",
    min_pages: int = 1, keep_last: bool = True,
) -> Sets:  # fmt: skip
    roles, rule = always(len(q), len(k[0]), dense_layers), top_k(budget, minimum=min_pages, keep_last=keep_last)
    return composed(q, k, roles=roles, rule=rule, scorer="page_bounds", page=page, heads=heads).sets


def less_is_more(
    q: list[Array], k: list[Array], *, budget: int, reselect: Sequence[int] = (), dense_layers: int = 2,
    sinks: int = 4, recent: float = 0.25, scorer: str = "exact", page: int = 1,
) -> Sets:  # fmt: skip
    def choose(layer: int, q: Array, k: Array) -> list[Cut]:
        length, rows = k.shape[1], unit_scores(q, k, scorer=scorer, page=page, heads="query", pooling="max")
        if length <= budget:
            return [Cut(list(range(length)))] * len(q)
        # Of pages everything is counted in pages.
        units, size, first = len(rows[0]), budget // page, math.ceil(sinks / page)
        # The share is a decimal number: 0.29 of 100 is 29, whatever binary makes of it.
        reserved = max(math.floor(size * recent + 1e-9), first + 1)
        wanted, first_recent = size - reserved, units - (reserved - first)
        union = rank_union([best(row, range(first, first_recent), wanted) for row in rows], wanted)
        chosen = sorted([*range(min(first, units)), *union, *range(max(first_recent, first), units)])
        tokens = [t for unit in chosen for t in range(unit * page, min((unit + 1) * page, length))]
        return [Cut(tokens)] * len(q)

    return by_roles(q, k, persistent(len(q), len(k[0]), dense_layers, [dense_layers, *reselect]), choose).sets


# --- attention over given sets, and what is measured -------------------------------------------------------------


def outputs(q: Array, k: Array, v: Array, sets: list[list[int]], scale: float) -> Array:
    """``[Hq, d]``: each query head over its own set."""
    return np.array(attention(q, k, v, sets, scale))


def attention_recall(q: Array, k: Array, sets: list[list[int]], scale: float) -> list[float]:
    """The dense softmax mass that falls on the set, per query head (LessIsMore eq. 3)."""
    group = q.shape[0] // k.shape[0]
    every = range(k.shape[1])
    return [float(weights(q[h], k[h // group], every, scale)[s].sum()) for h, s in enumerate(sets)]


def token_recall(q: Array, k: Array, sets: list[list[int]], count: int) -> list[float]:
    """The share of dense's own top `count` tokens that lies in the set, per query head (Tidal fig. 2b)."""
    rows = raw_scores(q, k, "each")
    every = range(k.shape[1])
    result = []
    for h, s in enumerate(sets):
        top = best(rows[h], every, count)
        result.append(len(set(top) & set(s)) / len(top))
    return result
