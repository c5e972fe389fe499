"""Quest's bounds over chunks of text, naive in float64: scores and sets of one sequence at one step.

Written from Quest's score and our rulings; nothing of the package is used. Nothing is kept between steps either: the
chunks follow from the tokens.
"""

from collections.abc import Sequence

from methods.oracles import Array
from methods.oracles_cluster import chunks_of


def chunk_sets(
    q: Array, k: Array, levels: Sequence[int | None], *, budget: int, shortest: int, longest: int
) -> list[list[int]]:
    """Positions for every query head; q ``[Hq, d]``, k ``[Hkv, T, d]`` with the current token, which is in no chunk.

    Chunks are taken by their group's best score, ties to the lower position, until the next one does not fit beside the
    tokens that are in no chunk.
    """
    length, group = k.shape[1], q.shape[0] // k.shape[0]
    if length <= budget:
        return [list(range(length)) for _ in range(q.shape[0])]
    chunks = chunks_of(levels, 0, length - 1, shortest, longest)
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
