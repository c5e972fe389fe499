"""LycheeCluster, naive in float64: chunks, spherical k-means, top-down search and lazy updates of one sequence.

Written from the paper (section 4, algorithm 1, appendices A and B) and our rulings; nothing of the package is used.
The index is float32 in the package, so every decision here also says by how many units of float32's error it was
taken: a test compares exact sets only while `margin` is above 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .oracles import Array

PRODUCT_ERROR = 1e-5
"""Between two inner products of unit vectors of 8 numbers: 3e-6 at worst when built, more after lazy updates."""
STORE_ERROR = 3e-7
"""Of an element of a centroid before it is rounded to bfloat16: five float32 roundings of a number below 1."""
TIE = 1e-9
"""Closer than that is equal in exact arithmetic: the lower index wins."""


@dataclass(frozen=True)
class Settings:
    budget: int
    sinks: int = 16
    buffer: int = 128
    chunk_min: int = 8
    chunk_max: int = 16
    chunking: str = "text"
    pooling: str = "mean"
    cluster_size: int = 2
    coarse: str = "sqrt"
    k_g: int | None = None
    replant: int | None = 128  # chunks that are planted together; None: all at once, later ones join lazily
    bfloat16: bool = False
    exact_ties: bool = False  # equal values are equal in float32 too, so that the lower index is what both take


Span = tuple[int, int]


def default_buffer(budget: int, sinks: int, chunk_max: int, every: int = 0) -> int:
    """Beside it the budget must hold a chunk, and what may be in none: unclean tokens and the rest of a cut."""
    return max(1, min(128, budget // 4, budget - sinks - every - (chunk_max - 1) - chunk_max))


def chunks_of(levels: Sequence[int | None] | None, start: int, stop: int, shortest: int, longest: int) -> list[Span]:
    """Greedy cuts of positions start..stop; a chunk is cut as soon as `longest` tokens stand behind its start.

    After `shortest` tokens, the strongest delimiter up to `longest` ends the chunk (1 is strongest, 0 none), among
    equals the latest; without one, or where nobody knows a token, it is as long as it may be. `levels` None: no text.
    """
    spans = []
    while start + longest <= stop:
        length = longest
        behind = [None] if levels is None else levels[start : start + longest]
        if None not in behind:
            strength = {n: behind[n - 1] or 0 for n in range(shortest, longest + 1) if behind[n - 1]}
            if strength:
                length = max(n for n in strength if strength[n] == min(strength.values()))
        spans.append((start, start + length))
        start += length
    return spans


def unit_vector(v: Array) -> Array:
    norm = np.linalg.norm(v)
    return v / norm if norm > TIE else np.zeros_like(v)


@dataclass
class Margin:
    """The closest decision so far, in units of its float32 error."""

    exact_ties: bool = False
    smallest: float = math.inf

    def note(self, gap: float, error: float = PRODUCT_ERROR, fragile: bool = False) -> None:
        if gap > TIE or fragile or not self.exact_ties:
            self.smallest = min(self.smallest, gap / error)

    def highest(self, values: Sequence[float]) -> int:
        """Index of the largest value; ties to the lower index."""
        top = max(values)
        index = next(i for i, value in enumerate(values) if value >= top - TIE)
        for i, value in enumerate(values):
            if i != index:
                self.note(top - value)
        return index


def k_means(vectors: list[Array], count: int, margin: Margin, iterations: int = 10) -> tuple[list[Array], list[int]]:
    """Spherical k-means: centroids (not rounded) and the labels of the last iteration."""
    centroids = [vectors[i * len(vectors) // count].copy() for i in range(count)]
    labels: list[int] = []
    for _ in range(iterations):
        labels = [margin.highest([float(centroid @ v) for centroid in centroids]) for v in vectors]
        for cluster in range(count):
            if cluster in labels:
                continue
            spare = [i for i in range(len(vectors)) if labels.count(labels[i]) >= 2]
            distance = [-float(centroids[labels[i]] @ vectors[i]) for i in spare]
            labels[spare[margin.highest(distance)]] = cluster
        for cluster in range(count):
            mean = np.mean([v for v, label in zip(vectors, labels, strict=True) if label == cluster], axis=0)
            margin.note(float(np.linalg.norm(mean)))
            if np.linalg.norm(mean) > TIE:
                centroids[cluster] = unit_vector(mean)
    return centroids, labels


@dataclass
class Node:
    """A fine cluster (of chunks) or a coarse unit (of clusters)."""

    centroid: Array
    children: list[int]
    radius: float = 0.0
    count: int = 0  # of the running mean
    moved: bool = False  # by a lazy update


@dataclass
class HeadIndex:
    """The index of one KV head of one sequence; `end` is where its last chunk ends."""

    settings: Settings
    margin: Margin
    spans: list[Span] = field(default_factory=list)
    keys: list[Array] = field(default_factory=list)
    built: int = 0
    clusters: list[Node] = field(default_factory=list)
    units: list[Node] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.spans[-1][1] if self.spans else self.settings.sinks

    def store(self, v: Array) -> Array:
        """As the cache's dtype keeps it."""
        if not self.settings.bfloat16:
            return v
        spacing = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(v), 2.0**-100))) - 7)
        rounded = np.rint(v / spacing) * spacing
        for step, gap in zip(spacing, spacing / 2 - np.abs(v - rounded), strict=True):
            if step > PRODUCT_ERROR / 4:  # the other neighbour of a smaller element changes nothing that is compared
                self.margin.note(float(gap), STORE_ERROR)
        return rounded

    def chunk_key(self, k: Array, span: Span) -> Array:
        keys = k[span[0] : span[1]]
        return unit_vector(keys.mean(axis=0) if self.settings.pooling == "mean" else keys.max(axis=0))

    def build(self, k: Array, spans: list[Span]) -> None:
        """Groups of `replant` chunks in order, each planted by itself."""
        self.spans, self.keys = list(spans), [self.chunk_key(k, span) for span in spans]
        self.built, self.clusters, self.units = len(spans), [], []
        size = self.settings.replant or len(spans)
        for first in range(0, len(spans), size):
            self._plant(list(range(first, min(first + size, len(spans)))))

    def _plant(self, chunks: list[int]) -> None:
        """Clusters and units of some chunks, behind those that there are."""
        count = math.ceil(len(chunks) / self.settings.cluster_size)
        centroids, labels = k_means([self.keys[i] for i in chunks], count, self.margin)
        clusters = [
            Node(self.store(c), [i for i, label in zip(chunks, labels, strict=True) if label == n])
            for n, c in enumerate(centroids)
        ]
        for node in clusters:
            node.radius = max(float(np.linalg.norm(self.keys[i] - node.centroid)) for i in node.children)
            node.count = len(node.children)
        wanted = math.ceil(math.sqrt(count)) if self.settings.coarse == "sqrt" else count
        centroids, labels = k_means([node.centroid for node in clusters], min(64, wanted), self.margin)
        before = len(self.clusters)
        self.clusters += clusters
        for number, centroid in enumerate(centroids):
            children = [before + i for i, label in enumerate(labels) if label == number]
            unit = Node(self.store(centroid), children, count=len(children))
            below = [self.keys[i] for c in children for i in self.clusters[c].children]
            unit.radius = max(float(np.linalg.norm(v - unit.centroid)) for v in below)
            self.units.append(unit)

    def add(self, k: Array, span: Span) -> None:
        """Lazy update: the nearest cluster and its unit take the chunk in; radii pay for the move of their centre."""
        v = self.chunk_key(k, span)
        self.spans.append(span)
        self.keys.append(v)
        number = self.margin.highest([float(node.centroid @ v) for node in self.clusters])
        cluster = self.clusters[number]
        cluster.children.append(len(self.keys) - 1)
        self._move(cluster, v)
        unit = next(unit for unit in self.units if number in unit.children)
        self._move(unit, v)

    def _move(self, node: Node, v: Array) -> None:
        mean = (node.count * node.centroid + v) / (node.count + 1)
        moved = self.store(unit_vector(mean)) if np.linalg.norm(mean) > TIE else node.centroid
        reach = float(np.linalg.norm(v - moved))
        node.radius = max(node.radius + float(np.linalg.norm(moved - node.centroid)), reach)
        node.centroid, node.count, node.moved = moved, node.count + 1, True

    # --- search ---

    def ranked(self, q: Array, nodes: list[Node], among: Sequence[int]) -> tuple[list[int], dict[int, float]]:
        """Node numbers by upper bound (equation 2), best first, ties to the lower number; and the bounds."""
        norm = float(np.linalg.norm(q))
        bounds = {i: float(q @ nodes[i].centroid) + norm * nodes[i].radius for i in among}
        return sorted(among, key=lambda i: (-round(bounds[i], 9), i)), bounds

    def tokens_below(self, unit: Node) -> int:
        return sum(self.spans[i][1] - self.spans[i][0] for c in unit.children for i in self.clusters[c].children)

    def note(self, nodes: list[Node], bounds: dict[int, float], taken: int, other: int, q: Array) -> None:
        """That node `taken` was preferred to, or not to, node `other`."""
        error = 2 * PRODUCT_ERROR * max(1.0, float(np.linalg.norm(q)))
        gap, pair = abs(bounds[taken] - bounds[other]), (nodes[taken], nodes[other])
        # How often a radius was rounded up is the package's business: such a tie is none in float32. Nor is one of a
        # radius that was rounded up when it was planted and of another.
        fragile = any(node.moved and node.radius > 0 for node in pair) or pair[0].radius != pair[1].radius
        self.margin.note(gap, error, fragile=fragile)

    def search(self, q: Array, room: int) -> list[Span]:
        """The chunks to attend to, at most `room` tokens."""
        order, bounds = self.ranked(q, self.units, range(len(self.units)))
        kept = 0
        if self.settings.k_g is not None:
            kept = min(self.settings.k_g, len(order))
        else:
            held = 0
            while kept < len(order) and held < 4 * self.settings.budget:
                held += self.tokens_below(self.units[order[kept]])
                kept += 1
            # In another order fewer of them might have held as much.
            for other in order[: kept - 1] if held >= 4 * self.settings.budget else []:
                self.note(self.units, bounds, order[kept - 1], other, q)
        if kept < len(order):
            for other in order[kept:]:
                self.note(self.units, bounds, order[kept - 1], other, q)

        below = sorted(c for u in order[:kept] for c in self.units[u].children)
        order, bounds = self.ranked(q, self.clusters, below)
        taken: list[Span] = []
        for place, c in enumerate(order):
            for i in sorted(self.clusters[c].children, reverse=True):  # the latest first
                if sum(e - s for s, e in [*taken, self.spans[i]]) > room:
                    for other in order[:place] + order[place + 1 :]:
                        self.note(self.clusters, bounds, c, other, q)
                    return taken
                taken.append(self.spans[i])
        return taken


@dataclass
class Clustered:
    """One layer of one sequence over its steps: an index per KV head, once the row is longer than the budget.

    Attributes:
        seen: tokens that were looked at when the indexes were made.
    """

    settings: Settings
    heads: list[HeadIndex | None]
    margin: Margin
    seen: int = 0

    @classmethod
    def new(cls, settings: Settings, kv_heads: int) -> Clustered:
        return cls(settings, [None] * kv_heads, Margin(settings.exact_ties))

    def step(self, q: Array, k: Array, levels: Sequence[int] | None, clean: int | None = None) -> list[list[int]]:
        """Positions for every query head; q ``[Hq, d]``, k ``[Hkv, T, d]``, the delimiter level of every token.

        `clean` is the first position whose key an unrectified sparse step has written, None if nobody rectifies.
        """
        length, group, given = k.shape[1], q.shape[0] // k.shape[0], self.settings
        stop = 0 if length <= given.budget else min(length - 1, length if clean is None else clean)
        stop = stop // given.buffer * given.buffer
        text = levels if given.chunking == "text" else None
        spans = chunks_of(text, given.sinks, stop, given.chunk_min, given.chunk_max)
        self.heads = [self._brought(k[h], spans, index) for h, index in enumerate(self.heads)]
        self.seen = stop
        sets = []
        for h, index in enumerate(self.heads):
            if index is None:
                sets.append(list(range(length)))
                continue
            always = [*range(given.sinks), *range(index.end, length)]
            mean = q[h * group : (h + 1) * group].mean(axis=0)
            chosen = index.search(mean, given.budget - len(always))
            sets.append(sorted([*always, *(t for s, e in chosen for t in range(s, e))]))
        return [list(sets[h // group]) for h in range(q.shape[0])]

    def crop(self, tokens: int) -> None:
        """Everything behind so many tokens is taken back: what looked at some of it is made anew."""
        if tokens < self.seen:
            self.heads, self.seen = [None] * len(self.heads), 0

    def _brought(self, k: Array, spans: list[Span], index: HeadIndex | None) -> HeadIndex | None:
        """The head's index of `spans`, the first of which it may have."""
        if not spans:
            return None
        if index is not None and index.spans == spans:
            return index
        if index is None or self.settings.replant is not None:
            fresh = HeadIndex(self.settings, self.margin)
            fresh.build(k, spans)
            return fresh
        for span in spans[len(index.spans) :]:
            index.add(k, span)
        return index
