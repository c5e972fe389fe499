"""The index of attention mass: clusters of items, each group planted anew when its items have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels._mass_tree import MassSettings, MassTree
from ...kernels.chunk_keys.api import token_keys
from ...kernels.cluster_mass.api import cluster_mass
from ...types import Intake, KVView
from ..index import SlotSizes, Views
from .mass_plant import PlantedMass, plant_mass
from .runs import Runs, token_runs
from .token_settings import TokenSettings

TOGETHER = 2**17
"""Tokens of all heads that are planted together: a kilobyte each meanwhile, and fewer leave a device idle."""
ITERATIONS = 4
"""Of k-means: more change nothing that was measured."""


class MassIndex:
    """Trees of S slots in L layers.

    What is in a slot is a function of its clean tokens and their number alone: every group is planted from its own
    keys. So nothing drifts, what is taken back leaves no trace, and it does not matter in which calls the tokens came.

    Attributes:
        settings: sizes and choices.
        trees: of all layers, `[L, R, H, ...]`.
        layers: each layer's part of it.
        placed: slots of the steps' rows, int32 `[B]`.
        fixed: whether its memory never moves.
    """

    def __init__(self, settings: TokenSettings, sizes: SlotSizes) -> None:
        self.settings, self.fixed, keys = settings, sizes.fixed, sizes.keys
        self._numbers = {layer: number for number, layer in enumerate(sizes.layers)}
        groups, outer = settings.groups(sizes.longest), (len(self._numbers), sizes.slots, keys.heads)
        clusters, items = groups * settings.clusters, groups * settings.group

        def zeros(*inner: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros((*outer, *inner), dtype=dtype, device=keys.device)

        self._lay_out(
            MassTree(
                means=zeros(clusters, keys.head_dim, dtype=keys.dtype),
                spreads=zeros(clusters, dtype=torch.float32),
                sizes=zeros(clusters, dtype=torch.int32),
                labels=zeros(items, dtype=torch.int16),
                ends=torch.zeros(sizes.slots, dtype=torch.int32, device=keys.device),
                items=settings.group,
                clusters=settings.clusters,
            )
        )
        self._place_in_order()

    def take_in(self, new: Sequence[Intake], views: Views) -> None:
        device, heads = self.trees.ends.device, self.trees.sizes.shape[2]
        first = self._numbers[views.layers[0]]
        assert self._numbers[views.layers[-1]] - first == len(views.layers) - 1, "layers are neighbours in the trees"
        for slots, runs in token_runs(self.settings, new, device, max(TOGETHER // heads, 1)):
            seen = views.of(slots)
            step = max(TOGETHER // (len(slots) * heads * runs.tokens), 1)
            for start in range(0, len(views.layers), step):
                kvs = [seen[layer] for layer in views.layers[start : start + step]]
                self._plant(first + start, kvs, runs)
        told = [(one.slot, one.stop) for one in new]
        if told:
            rows, stops = torch.tensor(told, device="cpu").to(device, non_blocking=True).unbind(1)
            self.trees.ends.index_copy_(0, rows, stops.int())

    def place(self, slots: Sequence[int], on_device: Tensor) -> None:
        self.placed = on_device

    def grow(self, slots: int, longest: int) -> None:
        have, groups = self.trees.sizes.shape[1], self.settings.groups(longest)
        held = self.trees.labels.shape[3] // self.settings.group
        if slots > have or groups > held:
            # An eighth more, so that it does not move with every group.
            grown = torch.arange(max(slots, have), device=self.trees.ends.device).clamp(max=have)
            self._arrange(grown, max(groups + groups // 8 - held, 0) if groups > held else 0)

    def clear(self, slot: int) -> None:
        # A cluster without tokens is none, whatever else is left of it.
        for held in (self.trees.ends[slot], self.trees.sizes[:, slot]):
            held.fill_(0)

    def permute(self, rows: Tensor) -> None:
        self._arrange(rows, 0)

    @property
    def nbytes(self) -> int:
        return self.trees.nbytes

    def _arrange(self, slots: Tensor, more: int) -> None:
        """Slot `i` is what slot `slots[i]` was, empty if there was none, with room for so many more groups."""
        trees, settings = self.trees, self.settings

        def moved(held: Tensor, places: int, inner: int = 0) -> Tensor:
            return pad(held, (*(0, 0) * inner, 0, more * places, 0, 0, 0, 1)).index_select(1, slots)

        self._lay_out(
            replace(
                trees,
                means=moved(trees.means, settings.clusters, 1),
                spreads=moved(trees.spreads, settings.clusters),
                sizes=moved(trees.sizes, settings.clusters),
                labels=moved(trees.labels, settings.group),
                ends=pad(trees.ends, (0, 1)).index_select(0, slots),
            )
        )
        self._place_in_order()

    def _place_in_order(self) -> None:
        ends = self.trees.ends
        self.placed = torch.arange(len(ends), dtype=torch.int32, device=ends.device)

    def _lay_out(self, trees: MassTree) -> None:
        layers = {layer: MassLayer(self, _of_layer(trees, number)) for layer, number in self._numbers.items()}
        # Both at once: who was interrupted lays out again.
        self.trees, self.layers = trees, layers

    def _plant(self, first: int, kvs: Sequence[KVView], runs: Runs) -> None:
        """Plant the groups of some layers, from number `first` on."""
        layers, heads = len(kvs), self.trees.sizes.shape[2]
        tokens = token_keys(kvs, runs.begin, runs.tokens * runs.groups, runs.end)
        planted = plant_mass(
            tokens.view(-1, runs.tokens, tokens.shape[-1]), None, runs.items,
            runs.of_problems(runs.counts, layers, heads), runs.clusters,
            runs.of_problems(runs.made, layers, heads), ITERATIONS,
        )  # fmt: skip
        self._write(first, layers, runs, planted)

    def _write(self, first: int, layers: int, runs: Runs, planted: PlantedMass) -> None:
        trees, settings, heads = self.trees, self.settings, self.trees.sizes.shape[2]
        # A block's clusters are numbered among those of its group.
        at = runs.first * settings.clusters // settings.group
        labels = planted.labels.unflatten(0, (layers, -1, heads)) + (at % settings.clusters)[:, None, None]
        # Sinks are no items: those behind them move up.
        moved = torch.arange(runs.items, device=at.device) - (runs.begin - runs.first)[:, None]
        labels = labels.gather(3, moved.clamp(min=0)[:, None].expand_as(labels))
        found = planted.clusters
        for target, values, start in (
            (trees.labels, labels, runs.first),
            (trees.means, found.means.unflatten(0, (layers, -1, heads)), at),
            (trees.spreads, found.spreads.unflatten(0, (layers, -1, heads)), at),
            (trees.sizes, found.sizes.unflatten(0, (layers, -1, heads)), at),
        ):
            _put(target[first : first + layers], values, runs.slots, start)


def _put(target: Tensor, values: Tensor, slots: Tensor, start: Tensor) -> None:
    """Write `[L, n, H, w, ...]` into the slots of `[L, R, H, N, ...]` from a place on; beyond N nothing is written."""
    width, room = values.shape[3], target.shape[3]
    if slots.is_cpu:
        # Several times as fast as an index.
        for number, (slot, place) in enumerate(zip(slots.tolist(), start.tolist(), strict=True)):
            fits = min(width, room - place)
            target[:, slot, :, place : place + fits] = values[:, number, :, :fits]
        return
    head = torch.arange(target.shape[2], device=target.device)[:, None]
    at = (start[:, None] + torch.arange(width, device=target.device)).clamp(max=room - 1)[:, None]
    target[:, slots[:, None, None], head, at] = values.to(target.dtype)


def _of_layer(trees: MassTree, number: int) -> MassTree:
    """The tree of one; shares memory."""
    return replace(
        trees,
        means=trees.means[number],
        spreads=trees.spreads[number],
        sizes=trees.sizes[number],
        labels=trees.labels[number],
    )


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
