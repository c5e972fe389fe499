"""Any scorer with any rule and any roles: naive float64 loops, written from the papers and docs/policies.md.

A step is one new token of one sequence. ``q[l]`` is ``[Hq, d]``, ``k[l]`` and ``v[l]`` are ``[Hkv, T, d]`` with the
current token last. A "set" is the sorted list of the logical positions that one query head attends to.

A *unit* is a token or a page of `page` tokens. A scorer gives every unit of a selecting head a score, a rule cuts the
scores of one head into a `Cut`, roles say who refreshes its set and who attends to it. `heads` is "kv", "query" or
"all".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from oracles import page_scores, raw_scores

Sets = list[list[list[int]]]  # [layer][query head] -> positions, ascending
Array = np.ndarray
MASS_ERROR = 1e-5
"""Budget of a float32 softmax over up to 150 tokens: a weight is off by 26 u (harness.py), a sum by 150 u more."""


@dataclass
class Cut:
    """What a rule takes; `margin` is the distance of its closest decision in units of float32's error."""

    units: list[int]
    overflowed: bool = False
    margin: float = math.inf


@dataclass
class Outcome:
    """One step of one sequence: ``sets[layer][query head]``, whether that set overflowed, the closest decision."""

    sets: Sets
    overflowed: list[list[bool]] = field(default_factory=list)
    margin: float = math.inf


Scores = list[float]
Rule = Callable[[Scores, int, int], Cut]
"""From the unit scores of one head, the row's length and the tokens per unit."""

# --- scores and sets ---------------------------------------------------------------------------------------------


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


def dense(q: list[Array], k: list[Array]) -> Sets:
    return [everything(a, b) for a, b in zip(q, k, strict=True)]


# --- rules -------------------------------------------------------------------------------------------------------


def frame(units: int, unit: int, sinks: int, window: int) -> list[int]:
    """The current unit, and those that hold the first `sinks` tokens and the last `window`; the current one first."""
    first = range(min(math.ceil(sinks / unit), units))
    last = range(max(0, units - max(1, math.ceil(window / unit))), units)
    return [units - 1, *sorted({*first, *last} - {units - 1})]


def filled(scores: Scores, kept: list[int], count: int) -> list[int]:
    """What is kept and the best others, `count` in all."""
    return [*kept, *best(scores, sorted({*range(len(scores))} - {*kept}), count - len(kept))]


def top_k(budget: int, sinks: int = 0, window: int = 0, minimum: int = 1, keep_last: bool = True) -> Rule:
    """The frame and the best others, floor(budget / unit) in all or `minimum`; everything of a row that it covers."""

    def cut(scores: Scores, length: int, unit: int) -> Cut:
        if length <= budget:
            return Cut(list(range(len(scores))))
        kept = frame(len(scores), unit, sinks, window) if keep_last else []
        return Cut(filled(scores, kept, max(budget // unit, minimum)))

    return cut


def ratio(kept: float, minimum: int = 1, local: int = 1, sinks: int = 0, window: int = 0) -> Rule:
    """ReSA, equation 4: n = max(minimum, ceil(M * kept)) of M units, the last `local` ones and the frame among them."""

    def cut(scores: Scores, length: int, unit: int) -> Cut:
        units = len(scores)
        always = {*frame(units, unit, sinks, window), *range(max(0, units - local), units)}
        count = min(units, max(minimum, len(always), math.ceil(units * Fraction(str(kept)))))
        return Cut(filled(scores, sorted(always), count))

    return cut


def growing(kept: float) -> Rule:
    """A share of the row, of which an eighth are sinks and a quarter recent, at most 128 and 256 tokens."""

    def cut(scores: Scores, length: int, unit: int) -> Cut:
        units = len(scores)
        count = math.ceil(units * Fraction(str(kept)))
        first, last = min(128 // unit, count // 8), min(256 // unit, count // 4)
        return Cut(filled(scores, frame(units, 1, first, last), count))

    return cut


def probabilities(scores: Scores, scale: float) -> list[float]:
    top = max(scores)
    e = [math.exp((score - top) * scale) for score in scores]
    return [x / sum(e) for x in e]


def top_p(p: float, buffer: int, scale: float, sinks: int = 0, window: int = 0) -> Rule:
    """The frame, then the best others until the softmax mass reaches `p`; at most `buffer` of them."""

    def cut(scores: Scores, length: int, unit: int) -> Cut:
        assert unit == 1
        weights, kept, margin = probabilities(scores, scale), frame(length, 1, sinks, window), math.inf
        order = filled(scores, kept, length)
        count = length
        if p < 1:
            mass = math.fsum(weights[token] for token in kept[:-1])
            for count, token in enumerate(order[len(kept) - 1 :], start=len(kept)):  # noqa: B007  # it outlives the loop
                mass += weights[token]
                margin = min(margin, abs(mass - p) / MASS_ERROR)
                if mass >= p:
                    break
        return Cut(order[: min(count, buffer)], count > buffer, margin)

    return cut


def threshold(tau: float, buffer: int, scale: float, sinks: int = 0, window: int = 0) -> Rule:
    """The frame and all whose probability exceeds `tau`; the best of them that fit `buffer`."""

    def cut(scores: Scores, length: int, unit: int) -> Cut:
        assert unit == 1
        weights, kept = probabilities(scores, scale), frame(length, 1, sinks, window)
        others = [token for token in filled(scores, kept, length)[len(kept) :] if weights[token] > tau]
        free = {*range(length)} - {*kept}
        margin = min((abs(weights[token] / tau - 1) / MASS_ERROR for token in free), default=math.inf)
        return Cut([*kept, *others][:buffer], len(kept) + len(others) > buffer, margin)

    return cut


# --- scorers -----------------------------------------------------------------------------------------------------


def unit_scores(q: Array, k: Array, *, scorer: str, page: int, heads: str, pooling: str) -> list[Scores]:
    """Scores of all units per selecting head: one per KV head, one per query head, or one for all.

    A group shares the maximum of its heads' scores ("max") or the score of its mean query ("mean"); of "mass" these are
    the scores of its heads, each by itself. The exact score of a page is the maximum over its tokens (LycheeDecode,
    section 4.3), its bound is Quest's.
    """
    group = q.shape[0] // k.shape[0]
    if heads == "kv" and pooling == "mean":
        q, group = q.reshape(k.shape[0], group, -1).mean(axis=1), 1
    if scorer == "page_bounds":
        rows = page_scores(q, k, page, "each")
    else:
        tokens = raw_scores(q, k, "each")
        rows = [[max(row[start : start + page]) for start in range(0, len(row), page)] for row in tokens]
    return rows if pooling == "mass" else over_group(rows, group, heads)


def cut_by_mass(members: list[Scores], length: int, unit: int, rule: Rule, scale: float) -> Cut:
    """The units of most mass: each head's softmax over all units but the last, which is kept, summed over the group."""
    units = len(members[0])
    each = [[*(probabilities(row[:-1], scale) if units > 1 else []), 0.0] for row in members]
    mass = [math.fsum(column) for column in zip(*each, strict=True)]
    cut = rule(mass, length, unit)
    left = sorted({*range(units - 1)} - {*cut.units})
    # Units of one mass need not tie in float32: vectors of numbers and what is left of them have another exp each.
    for one in {*cut.units} - {units - 1}:
        for other in left:
            cut.margin = min(cut.margin, abs(mass[one] - mass[other]) / (MASS_ERROR * mass[one]))
    return cut


# --- roles -------------------------------------------------------------------------------------------------------

Chooser = Callable[[int, Array, Array], list[Cut]]
"""From a layer and its q and k, the tokens chosen for every query head."""

Roles = Sequence[Sequence[str]]


def by_roles(q: list[Array], k: list[Array], roles: Roles, choose: Chooser) -> Outcome:
    """Publish and select refresh the set of their head index, select and reuse attend to it, the others to all."""
    outcome = Outcome(dense(q, k), [[False] * layer.shape[0] for layer in q])
    rolling: dict[int, Cut] = {}
    for layer, by_head in enumerate(roles):
        group = q[layer].shape[0] // k[layer].shape[0]
        fresh = choose(layer, q[layer], k[layer]) if {"publish", "select"} & set(by_head) else []
        for head in range(q[layer].shape[0]):
            role = by_head[head // group]
            if role in ("publish", "select"):
                rolling[head] = fresh[head]
                outcome.margin = min(outcome.margin, fresh[head].margin)
            if role in ("select", "reuse"):
                outcome.sets[layer][head] = list(rolling[head].units)
                outcome.overflowed[layer][head] = rolling[head].overflowed
    return outcome


def composed(
    q: list[Array], k: list[Array], *, roles: Roles, rule: Rule, scorer: str = "exact", page: int = 1,
    heads: str = "kv", pooling: str = "max", scale: float = 1.0,
) -> Outcome:  # fmt: skip
    def choose(layer: int, q: Array, k: Array) -> list[Cut]:
        length, cuts = k.shape[1], []
        rows: list = unit_scores(q, k, scorer=scorer, page=page, heads=heads, pooling=pooling)
        if pooling == "mass":
            group = len(rows) // k.shape[0]
            rows = [rows[i : i + group] for i in range(0, len(rows), group)]
        for row in rows:
            cut = cut_by_mass(row, length, page, rule, scale) if pooling == "mass" else rule(row, length, page)
            tokens = [t for unit in sorted(cut.units) for t in range(unit * page, min((unit + 1) * page, length))]
            cuts.append(Cut(tokens, cut.overflowed, cut.margin))
        return [cuts[head * len(cuts) // q.shape[0]] for head in range(q.shape[0])]

    return by_roles(q, k, roles, choose)


# --- who does what in which layer ----------------------------------------------------------------------------------


def persistent(layers: int, kv_heads: int, dense_layers: int, publishers: Sequence[int]) -> Roles:
    """TidalDecode: dense layers, layers that attend to all and publish, and reuse everywhere else."""
    names = ["dense" if i < dense_layers else "publish" if i in publishers else "reuse" for i in range(layers)]
    return [[name] * kv_heads for name in names]


def always(layers: int, kv_heads: int, dense_layers: int) -> Roles:
    """Dense layers, then a new set in every layer (exact top-k, Quest, ReSA)."""
    return [["dense" if i < dense_layers else "select"] * kv_heads for i in range(layers)]


def every(layers: int, kv_heads: int, step: int, dense_layers: int = 0) -> Roles:
    """Dense layers, then of every `step` layers the first attends to all and publishes, the others reuse."""
    return persistent(layers, kv_heads, dense_layers, range(dense_layers, layers, step))
