"""Quest's bounds over chunks of text, naive in float64: chunks, scores and sets of one sequence at one step.

Written from Quest's score, LycheeCluster's chunking (section 4.3, appendix B) and our rulings; nothing of the package
is used. Nothing is kept between steps either: the chunks follow from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .oracles import Array

Levels = Sequence[int | None]
"""Delimiter level of every token: 1 strongest to 4, 0 none, None where nobody knows the token."""


@dataclass(frozen=True)
class Sizes:
    """`unknown` is the length of a chunk where nobody knows a token that could end it."""

    shortest: int
    longest: int
    unknown: int


def chunks_of(levels: Levels, stop: int, sizes: Sizes) -> list[tuple[int, int]]:
    """Cuts of positions 0..stop: a chunk is cut once `longest` tokens lie behind its start.

    It ends with the strongest delimiter between `shortest` and `longest` tokens, among equals the latest; without one
    it is as long as it may be.
    """
    chunks, start = [], 0
    while stop - start >= sizes.longest:
        length = sizes.longest
        if any(levels[t] is None for t in range(start, start + sizes.longest)):
            length = sizes.unknown
        else:
            strongest = 5
            for n in range(sizes.shortest, sizes.longest + 1):
                level = levels[start + n - 1] or 5
                if level < 5 and level <= strongest:
                    strongest, length = level, n
        chunks.append((start, start + length))
        start += length
    return chunks


def chunk_sets(
    q: Array, k: Array, levels: Levels, clean: int, *, budget: int, sizes: Sizes, heads: str, pooling: str
) -> list[list[int]]:
    """Positions for every query head; q ``[Hq, d]``, k ``[Hkv, T, d]`` with the current token last.

    `clean` tokens may be in chunks, the current one never. Chunks are taken by score, ties to the lower position, until
    the next one does not fit beside the tokens that are in no chunk.
    """
    length, group = k.shape[1], q.shape[0] // k.shape[0]
    if length <= budget:
        return [list(range(length)) for _ in range(q.shape[0])]
    chunks = chunks_of(levels, min(length - 1, clean), sizes)
    open_rest = list(range(chunks[-1][1] if chunks else 0, length))
    sets = []
    for h in range(q.shape[0]):
        sharing = [h] if heads == "query" else list(range(h // group * group, (h // group + 1) * group))
        queries = [q[i] for i in sharing]
        if heads == "kv" and pooling == "mean":
            queries = [np.mean(queries, axis=0)]
        scores = []
        for start, stop in chunks:
            keys = k[h // group][start:stop]
            low, high = keys.min(axis=0), keys.max(axis=0)
            scores.append(
                max(float(sum(max(x * a, x * b) for x, a, b in zip(p, low, high, strict=True))) for p in queries)
            )
        taken: list[int] = []
        for c in sorted(range(len(chunks)), key=lambda c: (-scores[c], c)):
            inside = range(*chunks[c])
            if len(open_rest) + len(taken) + len(inside) > budget:
                break
            taken += inside
        sets.append(sorted(taken + open_rest))
    return sets
