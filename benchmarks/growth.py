"""What choosing a set costs per step as the context grows: cluster search, Quest's page bounds, exact scores."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch
from scipy.signal import lfilter
from scipy.stats import linregress
from torch import Tensor

from lab.whole_tree import WholeTree, WholeTreeLayer
from saccade.bench.rows import quartiles
from saccade.checkpoints.load import DTYPES
from saccade.decode.state import own_indexes
from saccade.errors import PolicyError, SaccadeError
from saccade.eval.output import whole_numbers
from saccade.plans.plan import Plan, layer_roles
from saccade.recipes.machine import environment
from saccade.selection.clusters.index import ClusterLayer
from saccade.selection.clusters.selector import ClusterSelector
from saccade.selection.clusters.tree import ClusterTree
from saccade.selection.index import Index
from saccade.selection.rules import TopK
from saccade.selection.scorers.exact import ExactScorer
from saccade.selection.scorers.page_bounds import PageBoundScorer
from saccade.selection.selector import ScoredSelector
from saccade.text.history import TokenHistory
from saccade.types import KVView, ModelShape, Rows, Selection

QUEST_PAGE = 16
SELECTORS = ("groups", "cap64", "sqrt", "root", "quest", "exact")
"""groups is `lychee_cluster` as it comes; the next three are numbers of coarse units where all is planted at once, as
in the paper; cap64 and sqrt are at most 64."""

_CORRELATION = 0.9
"""Of neighbouring keys: chunks hang together, as those of a text do, but there are no clusters to be found at once."""
_CHUNK = 12  # tokens, the mean of the paper's 8 to 16
_QUERIES = 8


@dataclass(frozen=True, slots=True)
class GrowthSettings:
    """What the user can choose; see `python -m benchmarks growth --help`."""

    contexts: str
    selectors: str
    budget: int
    head_dim: int
    group: int
    rounds: int
    threads: int
    dtype: str
    seed: int
    k_g: int | None = None


@dataclass
class Growth:
    """Checked settings and what was measured; `run` it, then read `results`, also in the middle of it."""

    settings: GrowthSettings
    contexts: tuple[int, ...]
    selectors: tuple[str, ...]
    _subjects: list[_Subject] = field(init=False, default_factory=list)

    @classmethod
    def check(cls, settings: GrowthSettings) -> Growth:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        names = tuple(dict.fromkeys(name.strip() for name in settings.selectors.split(",")))
        for name in names:
            if name not in SELECTORS:
                raise SaccadeError(f"unknown selector {name!r}; valid: {', '.join(SELECTORS)}")
        if settings.dtype not in DTYPES:
            raise SaccadeError(f"unknown dtype {settings.dtype!r}; valid: {', '.join(DTYPES)}")
        sizes = tuple(sorted(whole_numbers("--context", settings.contexts, at_least=1)))
        if sizes[0] <= settings.budget:
            raise PolicyError(
                f"--context {sizes[0]} is not valid: within a budget of {settings.budget} nothing is chosen"
            )
        growth = cls(settings, sizes, names)
        for name in names:
            growth.selector(name)
        return growth

    def selector(self, name: str) -> ClusterSelector | ScoredSelector:
        """What chooses, by its name in `SELECTORS`; for clusters what their index is told.

        Raises:
            PolicyError: a budget too small for it.
        """
        budget = self.settings.budget
        if name == "quest":
            if budget < QUEST_PAGE:
                raise PolicyError(f"budget={budget} holds no page of {QUEST_PAGE}")
            return ScoredSelector(PageBoundScorer(QUEST_PAGE, "max"), TopK(budget))
        if name == "exact":
            return ScoredSelector(ExactScorer("max"), TopK(budget))
        sizes: Any = {"chunking": "fixed", "chunk_min": min(8, _CHUNK), "chunk_max": _CHUNK}
        if name == "groups":
            return ClusterSelector(budget, **sizes)
        own: Any = {"coarse": name, "k_g": self.settings.k_g}
        return WholeTree(budget, **sizes, **own)

    @property
    def units(self) -> int:
        """Units of work: an index built or a round over all of them each."""
        return len(self.contexts) * len(self.selectors) + self.settings.rounds

    @torch.inference_mode()
    def run(self, advance: Callable[[str], None]) -> None:
        """Build every index, then select in rounds over all contexts and selectors."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        keys = synthetic_keys(self.contexts[-1], settings.head_dim, settings.seed).to(DTYPES[settings.dtype])
        for context in self.contexts:
            kv = one_head(keys[:context])
            queries = synthetic_queries(keys[:context], settings.group, settings.seed)
            built: dict[int, _Subject] = {}
            for name in self.selectors:
                subject = _Subject(name, self.selector(name), kv, queries)
                # Above 4,096 clusters cap64 and sqrt are the same index, which is not built twice.
                twin = built.get(subject.coarse_units) if subject.coarse_units else None
                subject.build(twin)
                built[subject.coarse_units] = subject
                self._subjects.append(subject)
                advance(f"{name} over {context:,} tokens")
        for number in range(settings.rounds):
            for subject in self._subjects:
                subject.time(number)
            advance(f"round {number + 1} of {settings.rounds}")

    def results(self) -> dict[str, Any]:
        """What the JSON file holds; see docs/experiments.md."""
        settings, cpu = self.settings, torch.device("cpu")
        rows = [subject.row() for subject in self._subjects if subject.times]
        given = {"contexts": self.contexts, "selectors": self.selectors, "correlation": _CORRELATION, "chunk": _CHUNK}
        own = {name: [row for row in rows if row["selector"] == name] for name in self.selectors}
        return {
            "settings": asdict(settings) | given,
            "rows": rows,
            "exponents": [
                {"selector": name, "time": exponent(some, "us"), "visited": exponent(some, "visited")}
                for name, some in own.items()
            ],
            "environment": environment(threads=settings.threads, dtype=DTYPES[settings.dtype], device=cpu),
        }


class _Subject:
    """A selector over one context."""

    def __init__(self, name: str, selector: ClusterSelector | ScoredSelector, kv: KVView, queries: Tensor) -> None:
        self.name = name
        self.selector = selector
        self.times: list[float] = []
        self.shared = False
        self.index: Index | None = None
        roles = layer_roles(ModelShape(1, queries.shape[1], 1, kv.head_dim), 0)
        self._indexes = own_indexes(Plan(selector, roles), TokenHistory())
        self._kv = kv
        self._queries = queries

    @property
    def coarse_units(self) -> int:
        """Coarse units of the index to come, 0 where there are none."""
        if not isinstance(self.selector, WholeTree):
            return 0
        chunks = (self._kv.rows.max_len - 1 - self.selector.sinks) // _CHUNK
        return self.selector.units(max(-(-chunks // self.selector.cluster_size), 1))

    def build(self, twin: _Subject | None) -> None:
        """Build the index from the keys, as decoding would at its first step; or take that of an equal selector."""
        if twin is not None:
            self._indexes, self.shared = twin._indexes, True
        self.index = self._indexes.of(0, self._kv)

    def choose(self, q: Tensor) -> Selection:
        """The set for queries `[1, Hq, d]`, as a decoding step chooses it."""
        return self.selector.select(q, self._kv, self.index, None, q.shape[-1] ** -0.5)

    def time(self, number: int) -> None:
        """Choose a set, once untimed so that the caches hold what this selector reads last, then once timed."""
        q = self._queries[number % len(self._queries)][None]
        self.choose(q)
        start = time.perf_counter()
        self.choose(q)
        self.times.append(time.perf_counter() - start)

    def visited(self) -> float:
        """Nodes whose bound or score a search needs: units and clusters, pages, or tokens; mean over the queries."""
        if isinstance(self.selector, ClusterSelector):
            tree = tree_of(self.index)
            k_g = self.selector.k_g if isinstance(self.selector, WholeTree) else None
            return statistics.fmean(nodes_visited(tree, self.selector.budget, q, k_g) for q in self._queries)
        length = self._kv.rows.max_len
        return length if self.index is None else -(-length // QUEST_PAGE)

    def row(self) -> dict[str, Any]:
        """Medians and quartiles in microseconds."""
        length = self._kv.rows.max_len
        fast, median, slow = quartiles(self.times, 1e6)
        key_bytes = 2 * length * self._kv.head_dim * self._kv.k.element_size()
        return {
            "selector": self.name,
            "context": length,
            "us": median,
            "us_fast": fast,
            "us_slow": slow,
            "rounds": len(self.times),
            "visited": self.visited(),
            "build_seconds": self._indexes.build_seconds,
            "shared_index": self.shared,
            "index_share": self._indexes.nbytes / key_bytes,
        }


def tree_of(index: Index | None) -> ClusterTree:
    """That of the only row."""
    assert isinstance(index, ClusterLayer | WholeTreeLayer), "of clusters"
    return index.tree


def nodes_visited(tree: ClusterTree, budget: int, q: Tensor, k_g: int | None) -> int:
    """All coarse units, and the clusters of those that a search of one row keeps, for queries `[Hq, d]`."""
    query, held = q.float().mean(0), tree.unit_tokens[0, 0] > 0
    bounds = tree.unit_centroids[0, 0].float() @ query + query.norm() * tree.unit_radii[0, 0]
    order = bounds.masked_fill(~held, -torch.inf).argsort(descending=True, stable=True)[: int(held.sum())]
    tokens, kept = tree.unit_tokens[0, 0][order].long(), k_g
    if kept is None:
        kept = int((tokens.cumsum(0) - tokens < 4 * budget).sum())
    return len(order) + int(tree.unit_offsets[0, 0].diff()[order[:kept]].sum())


def synthetic_keys(count: int, head_dim: int, seed: int) -> Tensor:
    """Keys float32 `[count, d]`: a stationary Gaussian walk, so that neighbours are alike (`_CORRELATION`)."""
    noise = numpy.random.default_rng(seed).standard_normal((count, head_dim), dtype=numpy.float32)
    # The walk starts at a typical place.
    noise[0] /= math.sqrt(1 - _CORRELATION**2)
    walk = lfilter([math.sqrt(1 - _CORRELATION**2)], [1, -_CORRELATION], noise, axis=0)
    return torch.from_numpy(numpy.ascontiguousarray(walk, dtype=numpy.float32))


def synthetic_queries(keys: Tensor, group: int, seed: int) -> Tensor:
    """Queries `[n, group, d]`, each the key of some token and as much noise again."""
    generator = torch.Generator().manual_seed(seed)
    wanted = keys[torch.randint(len(keys), (_QUERIES,), generator=generator)]
    noise = torch.randn((_QUERIES, group, keys.shape[1]), generator=generator)
    return (wanted[:, None].float() + noise).to(keys.dtype)


def one_head(keys: Tensor) -> KVView:
    """One row and one KV head whose keys are `[T, d]`; values are never read here, so they are the keys again."""
    pages = keys[None, :, None]
    return KVView(pages, pages, Rows.on_host(torch.zeros((1, 1), dtype=torch.int32), [0], [len(keys)]))


def exponent(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float] | None:
    """Least squares of the logarithms over the context: slope and its standard error; None below three contexts."""
    if len(rows) < 3:
        return None
    fit = linregress(numpy.log([row["context"] for row in rows]), numpy.log([row[name] for row in rows]))
    return {"slope": float(fit.slope), "standard_error": float(fit.stderr)}
