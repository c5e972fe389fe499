"""The index of attention mass: clusters of single tokens, or chunks of text, with the means of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels._mass_tree import MassSettings, MassTree
from ...kernels.chunk_keys.api import token_keys
from ...kernels.cluster_mass.api import cluster_mass
from ...kernels.spherical_kmeans.api import member_means, spherical_kmeans
from ...text.table import ChunkTable
from ...types import Intake, KVView
from ..index import SlotSizes, Views
from .runs import Runs, chunk_runs, token_runs
from .settings import ClusterSettings
from .token_settings import TokenSettings
from .tree import put

TOGETHER = {"cpu": 2**10}
"""Tokens of all heads that are looked at together, elsewhere 2^18: each takes some two keys in float32 meanwhile."""

ITERATIONS = 4
"""Of k-means: 10 instead of 3 held .001 or .002 more of attention on two models (docs/log.md)."""


class MassIndex:
    """Trees of S slots in L layers.

    What is in a slot is a function of its clean tokens and their number alone: every group is made from its own keys.
    So nothing drifts, what is taken back leaves no trace, and it does not matter in which calls the tokens came.

    Attributes:
        settings: sizes and choices.
        trees: of all layers, `[L, R, H, ...]`; replaced when they grow, which fixed ones do not. Chunks are the same in
            all layers and heads, and so are their labels, `[1, R, 1, N]`.
        layers: each layer's part of it.
        table: where the text is cut, S rows; None: single tokens are clustered.
        placed: slots of the steps' rows, int32 `[B]`.
    """

    def __init__(self, settings: TokenSettings | ClusterSettings, sizes: SlotSizes) -> None:
        self.settings, keys, groups = settings, sizes.keys, settings.groups(sizes.longest)
        self._numbers = {layer: number for number, layer in enumerate(sizes.layers)}
        outer, sets, tokens = (len(self._numbers), sizes.slots, keys.heads), groups * settings.sets, settings.tokens

        def zeros(*inner: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(inner, dtype=dtype, device=keys.device)

        self.table, ends, used = None, *zeros(2, sizes.slots, dtype=torch.int32)
        labels = (*outer, groups * tokens), torch.int16
        if isinstance(settings, ClusterSettings):
            self.table = ChunkTable(settings.cuts, sizes.text, sizes.slots, sets, keys.device)
            # One column is nobody's.
            labels = (1, sizes.slots, 1, groups * tokens + 1), torch.int32
        self._lay_out(
            MassTree(
                means=zeros(*outer, sets, keys.head_dim, dtype=keys.dtype),
                spreads=zeros(*outer, sets, dtype=torch.float32),
                sizes=zeros(*outer, sets, dtype=torch.int32),
                labels=zeros(*labels[0], dtype=labels[1]),
                ends=ends,
                used=used,
                tokens=tokens,
                sets=settings.sets if self.table is None else 0,
            )
        )

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        first, heads = self._numbers[views.layers[0]], self.trees.sizes.shape[2]
        assert self._numbers[views.layers[-1]] - first == len(views.layers) - 1, "layers are neighbours in the trees"
        if self.table is not None:
            self.table.take_in(new)
        for tokens, runs in self._runs(new):
            together = max(TOGETHER.get(self.trees.ends.device.type, 2**18) // (heads * tokens), 1)
            for start in range(0, len(runs.on_host), together):
                part = runs.part(start, start + together)
                seen, step = views.of(part.on_host), max(together // len(part.on_host), 1)
                for layer in range(0, len(views.layers), step):
                    kvs = [seen[one] for one in views.layers[layer : layer + step]]
                    self._plant(slice(first + layer, first + layer + len(kvs)), kvs, part, tokens)
        self._end(new)

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        self.placed = on_device

    def grow(self, slots: int, longest: int) -> None:
        have, groups, held = self.trees.sizes.shape[1], self.settings.groups(longest), self._groups
        if slots > have or groups > held:
            grown = torch.arange(max(slots, have), device=self.trees.ends.device).clamp(max=have)
            # An eighth more, so that it does not move with every group.
            self._arrange(grown, max(groups + groups // 8, held))

    def clear(self, slot: int) -> None:
        if self.table is not None:
            self.table.clear(slot)
        # A set without tokens is none, whatever else is left of it.
        for held in (self.trees.ends[slot], self.trees.used[slot], self.trees.sizes[:, slot]):
            held.fill_(0)

    def permute(self, rows: Tensor) -> None:
        self._arrange(rows, self._groups)

    @property
    def nbytes(self) -> int:
        return self.trees.nbytes + (0 if self.table is None else self.table.edges.nbytes)

    @property
    def _groups(self) -> int:
        """Of how many of a slot there is room for."""
        return self.trees.sizes.shape[3] // self.settings.sets

    def _runs(self, new: Sequence[Intake]) -> Iterator[tuple[int, Runs]]:
        """Groups of which something is new, and how many tokens each of them has at most."""
        if isinstance(self.settings, TokenSettings):
            yield from token_runs(self.settings, new, self.trees.ends.device)
            return
        assert self.table is not None, "chunks have one"
        runs = chunk_runs(self.settings, self.table, new, self._groups)
        assert runs.owners is not None, "sets are chunks"
        target = self.trees.labels[0, :, 0]
        position = runs.begin[:, None] + torch.arange(self.settings.tokens, device=target.device)
        at = torch.where(position < runs.end[:, None], position, target.shape[1] - 1)
        target[runs.slots[:, None], at] = (runs.owners + runs.place[:, None]).int()
        yield self.settings.tokens, runs

    def _end(self, new: Sequence[Intake]) -> None:
        """Note where what is in sets ends."""
        trees, table, settings = self.trees, self.table, self.settings
        told = torch.tensor([(one.slot, one.stop) for one in new], device="cpu")
        slots, ends = told.to(trees.ends.device, non_blocking=True).unbind(1)
        if table is None:
            # A power of two divides all of them.
            used = ends // settings.cluster_size
        else:
            ends, used = (held.index_select(0, slots) for held in (table.ends, table.counts))
        trees.ends.index_copy_(0, slots, ends.int())
        trees.used.index_copy_(0, slots, used.int())

    def _arrange(self, slots: Tensor, groups: int) -> None:
        """Slot `i` is what slot `slots[i]` was, empty if there was none, with room for so many groups."""
        trees, settings, more = self.trees, self.settings, groups - self._groups

        def moved(held: Tensor, places: int) -> Tensor:
            return pad(held, (*(0, 0) * (held.dim() - 4), 0, more * places, 0, 0, 0, 1)).index_select(1, slots)

        if self.table is not None:
            self.table.arrange(slots, groups * settings.sets)
        ends, used = (pad(held, (0, 1)).index_select(0, slots) for held in (trees.ends, trees.used))
        means, spreads, sizes = (moved(held, settings.sets) for held in (trees.means, trees.spreads, trees.sizes))
        labels = moved(trees.labels, settings.tokens)
        self._lay_out(replace(trees, means=means, spreads=spreads, sizes=sizes, labels=labels, ends=ends, used=used))

    def _lay_out(self, trees: MassTree) -> None:
        heads = trees.sizes.shape[2]

        def of_layer(number: int) -> MassTree:
            means, spreads, sizes = (held[number] for held in (trees.means, trees.spreads, trees.sizes))
            labels = trees.labels[number % len(trees.labels)].expand(-1, heads, -1)
            return replace(trees, means=means, spreads=spreads, sizes=sizes, labels=labels)

        layers = {layer: MassLayer(self, of_layer(number)) for layer, number in self._numbers.items()}
        placed = torch.arange(len(trees.ends), dtype=torch.int32, device=trees.ends.device)
        # All at once: who was interrupted lays out again.
        self.trees, self.layers, self.placed = trees, layers, placed

    def _plant(self, layers: slice, kvs: Sequence[KVView], runs: Runs, tokens: int) -> None:
        """Make the sets of some groups in some layers."""
        trees, heads = self.trees, self.trees.sizes.shape[2]
        keys = token_keys(kvs, runs.begin, tokens, runs.end).flatten(0, 2)

        def of_problems(told: Tensor) -> Tensor:
            return told[:, None].expand(len(kvs), -1, heads, *told.shape[1:]).flatten(0, 2)

        if runs.owners is not None:
            found = member_means(keys, of_problems(runs.owners), self.settings.sets)
        else:
            count = tokens // self.settings.cluster_size
            labels = alike(keys, of_problems(runs.end - runs.begin), count, of_problems(runs.made))
            found = member_means(keys, labels, count)
            # A block's clusters are numbered among those of its group; sinks are no tokens, and those behind move up.
            own = labels.unflatten(0, (len(kvs), -1, heads)) + (runs.place % self.settings.sets)[:, None, None]
            moved = torch.arange(tokens, device=own.device) - (runs.begin - runs.start)[:, None]
            own = own.gather(3, moved.clamp(min=0)[:, None].expand_as(own))
            put(trees.labels[layers], own, runs.slots, runs.start)
        for target, values in zip((trees.means, trees.spreads, trees.sizes), found, strict=True):
            put(target[layers], values.unflatten(0, (len(kvs), -1, heads)), runs.slots, runs.place)


@dataclass(frozen=True, slots=True, eq=False)
class MassLayer:
    """One layer's part of an index of attention mass: its tree, of all KV heads or of some."""

    owner: MassIndex
    tree: MassTree

    def scores(self, q: Tensor, kv: KVView, scale: float, *, each: bool) -> Tensor:
        """Of every token, float32 `[B, G, max_len]`, +inf of those that are always attended to."""
        settings, rows = self.owner.settings, kv.rows
        how = MassSettings(rows.max_len, settings.sinks, scale, settings.spread, each)
        return cluster_mass(q, self.tree, self.owner.placed, rows.seq_lens, how)

    def heads(self, start: int, stop: int) -> MassLayer:
        if (start, stop) == (0, self.tree.sizes.shape[1]):
            return self
        return MassLayer(self.owner, self.tree.heads(start, stop))


def alike(tokens: Tensor, counts: Tensor, clusters: int, made: Tensor) -> Tensor:
    """Labels int64 `[P, W]` of the first `counts` `[P]` of float32 `[P, W, d]`, in `made` `[P]` of `clusters`.

    The tokens behind must be zeros. Keys are compared by direction from their mean: what all have in common moves no
    softmax, and would make all alike.
    """
    # In two steps: a GPU adds up many in parts, whose number depends on what else is added up.
    total = tokens.unflatten(1, (-1, gcd(tokens.shape[1], 64))).sum(2).sum(1, keepdim=True)
    away = tokens - total / counts.clamp(min=1)[:, None, None]
    lengths = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
    away.div_(torch.where(lengths > 0, lengths, 1.0))
    labels, _ = spherical_kmeans(away, clusters, counts=counts, cluster_counts=made, iterations=ITERATIONS)
    return labels
