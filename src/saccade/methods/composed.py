"""Any scorer with any rule and any roles: the points between the published methods, for ablations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..plans.plan import Plan, dense_unless_told, layer_roles
from ..selection.clusters.selector import ClusterSelector
from ..selection.rules import RankUnion, Ratio
from ..selection.scorers.exact import ExactScorer
from ..selection.scorers.page_bounds import PageBoundScorer
from ..selection.scorers.random_head import RandomHeadScorer
from ..selection.selector import Rule, ScoredSelector, Selector
from ..types import HeadGrouping, ModelShape
from ._cut import CutOptions
from ._roles import roles_of
from .method import Method
from .options import AtLeastOne, DenseLayers, Page, Recent, RectifyField, Roles, Sinks, Whole

OWNERS = {"sinks": "rank_union", "recent": "rank_union", "min_pages": "ratio", "local_pages": "ratio"}
"""Options that one rule alone understands."""


class ComposedOptions(CutOptions):
    """Options of `composed`; an option that is not given takes what its scorer or rule is published with."""

    scorer: Literal["exact", "page_bounds", "cluster"] = "exact"
    """what tells promising tokens from the rest: exact q·k, min/max bounds of pages, or lychee_cluster's index"""
    rule: Literal["top_k", "top_p", "threshold", "ratio", "rank_union"] = "top_k"  # type: ignore[assignment]  # one more
    """how scores become a set: as in the other policies, or LessIsMore's rank_union"""
    page: Page | None = None
    """tokens per selection page; not given: 1 with exact scores, 16 with page bounds"""
    chunking: Literal["fixed", "text"] | None = None
    """scorer=cluster: chunks of one length, or cut where the text breaks; not given: text"""
    chunk_min: AtLeastOne | None = None
    """scorer=cluster: fewest tokens of a chunk; not given: 8"""
    chunk_max: AtLeastOne | None = None
    """scorer=cluster: most tokens of a chunk; not given: 16"""
    chunk_pooling: Literal["mean", "max"] | None = None
    """scorer=cluster: how a chunk's keys become one (LycheeCluster, table 3); not given: mean"""
    cluster_size: Annotated[AtLeastOne, Field(le=8)] | None = None
    """scorer=cluster: chunks per fine cluster (LycheeCluster, appendix E); not given: 2"""
    heads: HeadGrouping | None = None
    """kv, query or all: how many sets a layer has; not given: all with rank_union, else kv"""
    pooling: Literal["max", "mean", "random"] | None = None
    """heads=kv: a group's largest score, that of its mean query, or that of one of its query heads, drawn anew at every
    position; heads=all: random, one head of all; not given: max"""
    seed: Annotated[Whole, Field(ge=0)] | None = None
    """pooling=random: which heads are drawn; not given: 0"""
    roles: Roles = "select"
    """select: every layer after the dense ones; layers:2+5, every:N, heads:0+7.2: these publish; or a role file"""
    dense_layers: DenseLayers | None = None
    """how many first layers attend to everything; not given: 2, or 0 of roles=select beside layers of other kinds; with
    a role file or heads: what that says"""
    sinks: Sinks | None = None
    """rule=rank_union: first tokens that are always attended to; not given: 4"""
    recent: Recent | None = None
    """rule=rank_union: share of the budget kept for sinks and recent tokens; not given: 0.25"""
    min_pages: AtLeastOne | None = None
    """rule=ratio: fewest pages, or tokens with page=1, that are kept; not given: 1"""
    local_pages: AtLeastOne | None = None
    """rule=ratio: last pages, or tokens, that are always kept, the current one among them; not given: 1"""
    rectify: RectifyField = None

    @property
    def unit(self) -> int:
        return self.page or (16 if self.scorer == "page_bounds" else 1)

    @property
    def grouping(self) -> HeadGrouping:
        return self.heads or ("all" if self.rule == "rank_union" else "kv")

    @property
    def every(self) -> int:
        """Tokens between rectifications; 0: none."""
        return 0 if self.rectify is None else self.rectify.every

    @property
    def cut(self) -> Rule:
        if self.rule == "rank_union":
            sinks, recent = 4 if self.sinks is None else self.sinks, 0.25 if self.recent is None else self.recent
            return RankUnion(budget=self.tokens, sinks=sinks, recent=recent)
        if self.ratio is not None:
            return Ratio(self.ratio, minimum=self.min_pages or 1, local=self.local_pages or 1)
        return super().cut

    @property
    def selector(self) -> Selector:
        if self.scorer == "cluster":
            return ClusterSelector(
                budget=self.tokens,
                every=self.every,
                chunking=self.chunking or ClusterSelector.chunking,
                chunk_min=self.chunk_min or ClusterSelector.chunk_min,
                chunk_max=self.chunk_max or ClusterSelector.chunk_max,
                pooling=self.chunk_pooling or ClusterSelector.pooling,
                cluster_size=self.cluster_size or ClusterSelector.cluster_size,
            )
        if self.pooling == "random":
            heads: Literal["kv", "all"] = "all" if self.grouping == "all" else "kv"
            drawn = RandomHeadScorer(page=self.unit, heads=heads, seed=self.seed or 0)
            return ScoredSelector(drawn, self.cut, self.grouping)
        pooling = (self.pooling or "max") if self.grouping == "kv" else "each"
        scorer = ExactScorer(pooling, self.unit) if self.scorer == "exact" else PageBoundScorer(self.unit, pooling)
        return ScoredSelector(scorer, self.cut, self.grouping)

    def model_post_init(self, context: object, /) -> None:
        """Refuse what makes no sense together."""
        super().model_post_init(context)
        for name, owner in OWNERS.items():
            value = getattr(self, name)
            if value is not None and self.rule != owner:
                raise ValueError(f"{name}={value} belongs to rule={owner}, but the rule is {self.rule}")
        if self.scorer == "cluster":
            self._check_cluster()
        else:
            self._check_chunks()
        if self.scorer != "exact" and self.rule in ("top_p", "threshold"):
            raise ValueError(
                f"rule={self.rule} needs scorer=exact: {self.scorer} gives upper bounds, which are no probabilities"
            )
        if self.rule == "rank_union":
            if self.scorer != "exact" or self.unit != 1:
                raise ValueError("rule=rank_union needs scorer=exact and page=1: it merges rankings of single tokens")
            if self.grouping != "all":
                raise ValueError(f"heads={self.heads} does not fit rule=rank_union, which makes one set for all heads")
        elif self.grouping == "all" and self.pooling != "random":
            raise ValueError(f"heads=all needs rule=rank_union: rule={self.rule} does not merge the heads' scores")
        if self.pooling == "random":
            self._check_random()
        elif self.seed is not None:
            raise ValueError(f"seed={self.seed} belongs to pooling=random, but the pooling is {self.pooling or 'max'}")
        elif self.pooling is not None and self.grouping != "kv":
            raise ValueError(
                f"pooling={self.pooling} needs heads=kv: with heads={self.grouping} no group shares a score"
            )
        if self.dense_layers is not None and self.roles_name_every_head:
            raise ValueError(
                f"dense_layers={self.dense_layers} does not fit roles={self.roles}, which speaks of every layer"
            )
        self.check_page(self.unit)

    def _check_random(self) -> None:
        """Refuse a head drawn where none is, or where more than one is asked."""
        if self.scorer != "exact":
            raise ValueError(
                f"pooling=random needs scorer=exact, not {self.scorer}: it takes one query head's own scores"
            )
        if self.rule == "rank_union" or self.grouping == "query":
            other = "rule=rank_union" if self.rule == "rank_union" else "heads=query"
            raise ValueError(f"pooling=random does not fit {other}, where every query head is heard")

    def _check_cluster(self) -> None:
        """Refuse what an index of chunks has no use for."""
        if self.rule != "top_k":
            raise ValueError(
                f"rule={self.rule} does not fit scorer=cluster, which keeps whole chunks while they fit the budget: "
                "only rule=top_k does"
            )
        if self.page is not None:
            raise ValueError(f"page={self.page} does not fit scorer=cluster, which cuts chunks where the text breaks")
        for name, fixed in (("heads", "kv"), ("pooling", "mean")):
            value = getattr(self, name)
            if value not in (None, fixed):
                raise ValueError(
                    f"{name}={value} does not fit scorer=cluster, which searches with a group's mean query: "
                    f"only {name}={fixed} does"
                )

    def _check_chunks(self) -> None:
        """Refuse chunks where something else is scored."""
        if self.chunking == "text" and self.scorer == "page_bounds":
            raise ValueError(
                "chunking=text needs scorer=cluster; with page bounds it is the method text_pages of `claims` now"
            )
        if self.chunking is not None and self.scorer == "exact":
            raise ValueError(f"chunking={self.chunking} needs scorer=cluster, not exact")
        for name in ("chunk_min", "chunk_max", "chunk_pooling", "cluster_size"):
            value = getattr(self, name)
            if value is not None:
                raise ValueError(f"{name}={value} belongs to scorer=cluster, but the scorer is {self.scorer}")

    @property
    def roles_name_every_head(self) -> bool:
        return self.roles != "select" and not self.roles.startswith(("every:", "layers:"))


def plan(options: ComposedOptions, shape: ModelShape) -> Plan:
    """What the options say; publishers whose scorer dense attention does not compute refresh from the index."""
    if options.roles == "select":
        return Plan(options.selector, layer_roles(shape, dense_unless_told(shape, options.dense_layers)))
    dense_layers = 2 if options.dense_layers is None else options.dense_layers
    return Plan(options.selector, *roles_of(options.roles, shape, dense_layers))


METHOD = Method(
    "composed", "any scorer with any rule and any roles", "-", ComposedOptions, plan, compared=False, tuned=()
)
