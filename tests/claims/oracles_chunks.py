"""Quest's bounds over chunks of text, naive in float64: chunks, scores and sets of one sequence at one step.

Written from Quest's score, LycheeCluster's chunking (section 4.3, appendix B) and our rulings; nothing of the package
is used. Nothing is kept between steps either: the chunks follow from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from methods.oracles import Array

Levels = Sequence[int | None]
"""Delimiter level of every token: 1 strongest to 4, 0 none, None where nobody knows the token."""


def chunks_of(levels: Levels, stop: int, shortest: int, longest: int) -> list[tuple[int, int]]:
    """Cuts of positions 0..stop: a chunk is cut once `longest` tokens lie behind its start.

    It ends with the strongest delimiter between `shortest` and `longest` tokens, among equals the latest; without one,
    or where nobody knows a token, it is as long as it may be.
    """
    chunks, start = [], 0
    while stop - start >= longest:
        length, strongest = longest, 5
        known = all(levels[t] is not None for t in range(start, start + longest))
        for n in range(shortest, longest + 1) if known else ():
            level = levels[start + n - 1] or 5
            if level < 5 and level <= strongest:
                strongest, length = level, n
        chunks.append((start, start + length))
        start += length
    return chunks


def chunk_sets(q: Array, k: Array, levels: Levels, *, budget: int, shortest: int, longest: int) -> list[list[int]]:
    """Positions for every query head; q ``[Hq, d]``, k ``[Hkv, T, d]`` with the current token, which is in no chunk.

    Chunks are taken by their group's best score, ties to the lower position, until the next one does not fit beside the
    tokens that are in no chunk.
    """
    length, group = k.shape[1], q.shape[0] // k.shape[0]
    if length <= budget:
        return [list(range(length)) for _ in range(q.shape[0])]
    chunks = chunks_of(levels, length - 1, shortest, longest)
    rest = list(range(chunks[-1][1] if chunks else 0, length))
    sets = []
    for h, keys in enumerate(k):
        bounds = [(keys[start:stop].min(axis=0), keys[start:stop].max(axis=0)) for start, stop in chunks]
        scores = [
            max(
                float(sum(max(x * a, x * b) for x, a, b in zip(p, *bound, strict=True))) for p in q[h * group :][:group]
            )
            for bound in bounds
        ]
        taken: list[int] = []
        for c in sorted(range(len(chunks)), key=lambda c: (-scores[c], c)):
            inside = range(*chunks[c])
            if len(rest) + len(taken) + len(inside) > budget:
                break
            taken += inside
        sets += [sorted(taken + rest)] * group
    return sets
