"""How far float32 and bfloat16 arithmetic may be from float64: bounds derived from rounding, not fitted to results.

A sum of n products in floating point, in any order, errs by at most gamma(n) times the sum of the absolute products
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). The inputs are exact: the oracle reads the
rounded cache.
"""

import math
from collections.abc import Sequence

import numpy as np
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


def score_error(query: Vector, key: Vector, group: int) -> np.ndarray:
    """Bound for q·k in float32, of one key or of each; `group` more roundings where the query is their mean."""
    size = np.abs(np.asarray(query) * np.asarray(key)).sum(-1)
    return gamma(len(query) + group + 1) * size + SMALLEST


def largest_query(queries: Sequence[Vector]) -> list[float]:
    """Componentwise largest magnitude: bounds the products of every head of a group and of their mean."""
    largest: list[float] = np.abs(np.asarray(queries)).max(0).tolist()
    return largest


def attention_error(
    query: Vector,
    keys: Sequence[Vector],
    values: Sequence[Vector],
    chosen: Sequence[int],
    scale: float,
    dtype: torch.dtype,
    cap: float | None = None,
) -> np.ndarray:
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
    count, own, held = len(chosen), np.asarray(keys)[chosen], np.asarray(values)[chosen]
    logits = scale * (own @ np.asarray(query))
    spread = float(logits.max() - logits.min())
    peak = float(np.abs(logits).max())
    error = float((abs(scale) * score_error(query, own, 1)).max()) + FLOAT32 * (2 * peak + spread)
    error += 0.0 if cap is None else cap * 2.0**-21
    weight = math.exp(2 * error) * (1 + gamma(count + 5))
    rounded = (1 + UNIT[dtype]) ** 2
    relative = weight * rounded * (1 + gamma(2 * count)) - 1
    masses = oracles.weights(query, keys, chosen, scale, cap)
    size, underflow = masses @ np.abs(held), TINY[dtype] * np.abs(held).sum(0)
    before = relative * size + underflow
    return before + UNIT[dtype] * (np.abs(masses @ held) + before) + TINY[dtype]
