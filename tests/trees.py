"""What is in a cluster index, read node by node, and whether two are the same."""

from typing import Any

from saccade.decode.indexes import Indexes
from saccade.decode.state import own_indexes
from saccade.plans.plan import Plan, layer_roles
from saccade.selection.clusters.tree import ClusterTree
from saccade.selection.selector import Selector
from saccade.text.history import TokenHistory
from saccade.types import ModelShape


def beside(selector: Selector, history: TokenHistory | None = None, layers: int = 1) -> Indexes:
    """Empty indexes of a cache, all of whose layers choose."""
    return own_indexes(Plan(selector, layer_roles(ModelShape(layers, 4, 2, 8), 0)), history or TokenHistory())


def edges_of(index: Any, row: int = 0) -> list[int]:
    return index.owner.table.edges[row, : int(index.owner.table.counts[row]) + 1].tolist()


def nodes(tree: ClusterTree, head: int, row: int = 0) -> tuple[list[tuple[int, list[int]]], dict[int, list[int]]]:
    """Units that are there with their clusters, and the chunks of these clusters, by where they lie."""
    offsets, members = tree.offsets[row, head].tolist(), tree.members[row, head].tolist()
    starts, tokens = tree.unit_offsets[row, head].tolist(), tree.unit_tokens[row, head].tolist()
    units = [(unit, list(range(starts[unit], starts[unit + 1]))) for unit, held in enumerate(tokens) if held]
    return units, {c: members[offsets[c] : offsets[c + 1]] for _, clusters in units for c in clusters}


def same(one: Any, other: Any, row: int = 0, other_row: int = 0) -> None:
    """Bit by bit, but for room and what is absent."""
    assert edges_of(one, row) == edges_of(other, other_row)
    mine, yours = one.tree, other.tree
    for head in range(mine.radii.shape[1]):
        units, clusters = nodes(mine, head, row)
        assert nodes(yours, head, other_row) == (units, clusters)
        for unit, _ in units:
            for name in ("unit_centroids", "unit_radii", "unit_tokens"):
                assert getattr(mine, name)[row, head, unit].equal(getattr(yours, name)[other_row, head, unit]), name
        for cluster in clusters:
            for name in ("centroids", "radii", "numbers"):
                assert getattr(mine, name)[row, head, cluster].equal(getattr(yours, name)[other_row, head, cluster])
