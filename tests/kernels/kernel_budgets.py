"""How far float32 and bfloat16 arithmetic may be from float64: bounds derived from rounding, not fitted to results.

A sum of n products in floating point, in any order, errs by at most gamma(n) times the sum of the absolute products
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). The inputs are exact: the oracle reads the
rounded cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import torch

import oracles
from oracles import Vector

FLOAT32 = 2.0**-24
# Unit roundoff: half the distance from 1 to the next number; 24, 8 and 11 significant bits.
UNIT = {torch.float32: FLOAT32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = 2.0**-126  # below it float32 loses digits and bfloat16 instructions flush to zero
# Below these, float32 and bfloat16 arithmetic may flush to zero, and float16 has no number.
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


def gamma(terms: int) -> float:
    return terms * FLOAT32 / (1 - terms * FLOAT32)


def score_error(query: Vector, key: Vector, group: int) -> float:
    """Bound for q·k in float32; `group` more roundings where the query is itself a mean of that many."""
    size = math.fsum(map(abs, map(mul, query, key)))
    return gamma(len(query) + group + 1) * size + SMALLEST


def largest_query(queries: Sequence[Vector]) -> list[float]:
    """Componentwise largest magnitude: bounds the products of every head of a group and of their mean."""
    return [max(abs(component) for component in column) for column in zip(*queries, strict=True)]


def attention_error(
    query: Vector,
    keys: Sequence[Vector],
    values: Sequence[Vector],
    chosen: Sequence[int],
    scale: float,
    dtype: torch.dtype,
    cap: float | None = None,
) -> list[float]:
    """Bound per output component of softmax attention computed in float32 over a cache of `dtype`.

    1. A logit errs by e = scale · (score error) + two roundings (of the scale, of the product), and its distance to
       the maximum by one more rounding. Numerator and denominator of a weight each move by a factor up to exp(e).
       A soft-cap c lessens differences and adds c times the error of tanh(a) = (1 - t) / (1 + t), t = exp(-2a): of t
       2 units of itself and of 2a, of which at most 0.8 · 2^-23 arrives, and a unit for each of four operations:
       together less than 2^-21.
    2. exp is good to 2 units, the sum of n terms adds gamma(n), the division 1.
    3. A weight and a block's sum may each be rounded to `dtype` once more, as flash attention does; weights below its
       smallest number vanish.
    4. The weighted sum adds gamma(n + blocks); the result is rounded to `dtype`.
    """
    count = len(chosen)
    logits = [scale * oracles.dot(query, keys[position]) for position in chosen]
    spread = max(logits) - min(logits)
    peak = max(abs(logit) for logit in logits)
    error = max(scale * score_error(query, keys[position], 1) for position in chosen) + FLOAT32 * (2 * peak + spread)
    error += 0.0 if cap is None else cap * 2.0**-21
    weight = math.exp(2 * error) * (1 + gamma(count + 5))
    rounded = (1 + UNIT[dtype]) ** 2
    relative = weight * rounded * (1 + gamma(2 * count)) - 1
    masses = oracles.weights(query, keys, chosen, scale, cap)
    bounds = []
    for column in zip(*(values[position] for position in chosen), strict=True):
        exact = oracles.dot(masses, column)
        size = math.fsum(map(mul, masses, map(abs, column)))
        underflow = TINY[dtype] * math.fsum(map(abs, column))
        before = relative * size + underflow
        bounds.append(before + UNIT[dtype] * (abs(exact) + before) + TINY[dtype])
    return bounds
