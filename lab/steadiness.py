"""How much of what a step attends to the steps before it attended to as well (LycheeCluster, appendix D)."""

from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.adapters.hf.cache import session_of
from saccade.kernels._mass_tree import MassTree
from saccade.plans.roles import HeadSpan
from saccade.selection.clusters.tree import ClusterTree
from saccade.types import KVView, Selection, Softmax

_NEVER = -(2**31)


class Steadiness:
    """Observes the sets of every sparse step: clusters where the index has them, else pages or tokens.

    Of clusters, tokens that are in none are left out: sinks and the buffer are attended to whatever is retrieved.

    Per layer and head, S_t being what step t chose: Jaccard similarity |S_t ∩ S_t-1| / |S_t ∪ S_t-1| (equation 3) and
    window hit rate |S_t ∩ (S_t-1 ∪ … ∪ S_t-w)| / |S_t| (equation 4). Steps are counted where there was a set: dense
    passes and steps within the budget are left out. One row per batch.

    Attributes:
        cache: of the run, whose indexes know the clusters.

    Args:
        window: w.
        random: whether sets drawn at random, as many of as many at every step, are measured beside.
    """

    def __init__(self, window: int, *, random: bool = False) -> None:
        self.cache: Any = None
        self._random = numpy.random.default_rng(0) if random else None
        self._window = window
        self._last: dict[tuple[int, int], list[_LastSeen]] = {}
        self._steps: dict[tuple[int, int], list[tuple[float, ...]]] = {}

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        if selection is None:
            return
        place = (layer, span.start)
        chosen, among = self._chosen(layer, span, q, kv, selection)
        sets = [chosen] if self._random is None else [chosen, at_random(chosen, among, self._random)]
        seen = self._last.setdefault(place, [_LastSeen(len(chosen), self._window) for _ in sets])
        known = [pair for one, units in zip(seen, sets, strict=True) if (pair := one.step(units)) is not None]
        if known:
            self._steps.setdefault(place, []).append(tuple(value for pair in known for value in pair))

    def series(self) -> dict[str, list[float]]:
        """Means over layers and heads, step by step: "hit" and "jaccard"; the first step has no predecessor.

        With random sets also theirs, "hit_of_random" and "jaccard_of_random", and "jaccard_above_random".
        """
        names = ["hit", "jaccard", "hit_of_random", "jaccard_of_random"][: 2 if self._random is None else 4]
        steps = [values for values in self._steps.values() if values]
        shortest = min(map(len, steps), default=0)
        means = numpy.array([values[:shortest] for values in steps]).mean(axis=0) if steps else numpy.empty((0, 4))
        found = {name: means[:, place].round(4).tolist() for place, name in enumerate(names)}
        if self._random is not None:
            found["jaccard_above_random"] = (means[:, 1] - means[:, 3]).round(4).tolist()
        return found

    def _chosen(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection
    ) -> tuple[NDArray[numpy.int64], int]:
        """Numbers of what was chosen `[heads, n]`, -1 where there is nothing, and of how many: of the first row."""
        session = session_of(self.cache)
        index: Any = None if session is None else session.state.indexes.of(layer, kv)
        # An index of clusters has a tree, whichever it is.
        tree, ids = getattr(index, "tree", None), selection.ids[0]
        among = int(kv.rows.units(selection.unit)[0])
        if isinstance(tree, MassTree):
            among = int(tree.used[0])
            ids = sets_of(tree.heads(span.start, span.stop), ids, index.owner.settings.sinks)
        elif tree is not None:
            edges = tree.edges[0, : int(index.owner.table.counts[0]) + 1]
            among = int((tree.offsets[0, 0] == len(edges) - 1).int().argmax())
            ids = clusters_of(tree.heads(span.start, span.stop), edges, ids)
        numbers: NDArray[numpy.int64] = ids.cpu().numpy().astype(numpy.int64)
        return numbers, among


def at_random(chosen: NDArray[numpy.int64], among: int, generator: numpy.random.Generator) -> NDArray[numpy.int64]:
    """Sets `[heads, n]` of as many as are chosen, each drawn from `among` numbers."""
    drawn = numpy.full_like(chosen, -1)
    for head, size in enumerate((chosen >= 0).sum(axis=1).tolist()):
        drawn[head, :size] = generator.choice(among, size, replace=False)
    return drawn


def clusters_of(tree: ClusterTree, edges: Tensor, ids: Tensor) -> Tensor:
    """Numbers `[heads, n]` of the clusters whose chunks the first row's tokens `ids` are in, -1 where there are none.

    A cluster keeps its number once its group is full.
    """
    count = len(edges) - 1
    chunks = torch.bucketize(ids, edges, right=True) - 1
    inside = (chunks >= 0) & (chunks < count)
    of_chunk = torch.zeros_like(tree.members[0])
    for head, offsets in enumerate(tree.offsets[0]):
        # The last cluster ends where all chunks do; behind it there may be room for more.
        clusters = int((offsets == count).int().argmax())
        # Chunk by chunk in the order of the clusters: which cluster's they are.
        numbers = tree.numbers[0, head, :clusters].repeat_interleave(offsets[: clusters + 1].diff())
        of_chunk[head, tree.members[0, head, : len(numbers)].long()] = numbers
    found = of_chunk.gather(1, chunks.clamp(0, of_chunk.shape[1] - 1)).masked_fill(~inside, -1)
    return _once(found)


def sets_of(tree: MassTree, ids: Tensor, sinks: int) -> Tensor:
    """Numbers `[heads, n]` of the sets that the first row's tokens `ids` are in, -1 where they are in none."""
    inside = (ids >= sinks) & (ids < int(tree.ends[0]))
    labels = tree.labels[0].gather(1, ids.long().clamp(0, tree.labels.shape[2] - 1)).long()
    return _once((labels + ids.long() // tree.tokens * tree.sets).masked_fill(~inside, -1))


def _once(found: Tensor) -> Tensor:
    """Every number once, -1 instead of what is said again."""
    found = found.sort(dim=1).values
    return found.masked_fill(torch.nn.functional.pad(found[:, 1:] == found[:, :-1], (1, 0)), -1)


class _LastSeen:
    """When each unit of each head was last chosen."""

    def __init__(self, heads: int, window: int) -> None:
        self._at: NDArray[numpy.int64] = numpy.full((heads, 1), _NEVER, dtype=numpy.int64)
        self._window = window
        self._time = 0
        self._size: NDArray[numpy.int64] | None = None

    def step(self, chosen: NDArray[numpy.int64]) -> tuple[float, float] | None:
        """Hit rate and similarity of sets `[heads, n]` as means over heads; None for the first step."""
        missing = int(chosen.max(initial=0)) + 1 - self._at.shape[1]
        if missing > 0:
            self._at = numpy.pad(self._at, ((0, 0), (0, missing + missing // 8)), constant_values=_NEVER)
        valid = chosen >= 0
        heads, places = numpy.nonzero(valid)
        units = chosen[heads, places]
        age = numpy.full(chosen.shape, numpy.iinfo(numpy.int64).max)
        age[heads, places] = self._time - self._at[heads, units]
        size, before = valid.sum(axis=1), self._size
        self._at[heads, units] = self._time
        self._time += 1
        self._size = size
        if before is None:
            return None
        again = (age == 1).sum(axis=1)
        hits = (age <= self._window).sum(axis=1)
        union = size + before - again
        # A step that chose nothing from an empty set is as steady as can be.
        hit = numpy.where(size > 0, hits / numpy.maximum(size, 1), 1.0)
        return float(hit.mean()), float(numpy.where(union > 0, again / numpy.maximum(union, 1), 1.0).mean())
