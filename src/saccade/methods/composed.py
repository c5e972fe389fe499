"""Any scorer with any rule and any roles: the points between the published methods, for ablations."""

from collections.abc import Iterator
from typing import Annotated, Literal

from ..plans.plan import Plan, layer_roles
from ..selection.mass import MassSelector
from ..selection.rules import RankUnion, Ratio
from ..selection.rules.framed import FrameableRule, units_of
from ..selection.scorers.exact import ExactScorer
from ..selection.scorers.page_bounds import PageBoundScorer
from ..selection.selector import Rule, ScoredSelector, Selector
from ..types import HeadGrouping, ModelShape, Pooling
from ._cut import CutOptions
from ._roles import roles_of
from .method import Method
from .options import AtLeastOne, DenseLayers, Page, Recent, RectifyField, Roles, Sinks, moved

OWNERS = {
    "recent": ("rule", "rank_union"),
    **dict.fromkeys(("min_pages", "local_pages"), ("rule", "ratio")),
}
"""Options that only one rule understands."""


class ComposedOptions(CutOptions):
    """Options of `composed`; an option that is not given takes what its scorer or rule is published with."""

    scorer: Annotated[Literal["exact", "page_bounds"], moved("cluster", "lychee_cluster:form=paper", "")] = "exact"
    """what tells promising tokens from the rest: exact q·k, or min/max bounds of pages"""
    rule: Literal["top_k", "top_p", "threshold", "ratio", "rank_union"] = "top_k"  # type: ignore[assignment]  # one more
    """how scores become a set: as in the other policies, or LessIsMore's rank_union"""
    page: Page | None = None
    """tokens per selection page; not given: 1 with exact scores, 16 with page bounds"""
    heads: HeadGrouping | None = None
    """kv, query or all: how many sets a layer has; not given: all with rank_union, else kv"""
    pooling: Annotated[Literal["max", "mean", "mass"] | None, moved("random", "random_head")] = None
    """heads=kv: a group's largest score, that of its mean query, or the sum of its heads' softmax; not given: max"""
    roles: Roles = "select"
    """select: every layer after the dense ones; layers:2+5, every:N, heads:0+7.2: these publish; or a role file"""
    dense_layers: DenseLayers | None = None
    """how many first layers attend to everything; not given: 2, or 0 of roles=select beside layers of other kinds; with
    a role file or heads: what that says"""
    sinks: Sinks | None = None
    """first tokens that are in every set, inside the budget; not given: 4 with rank_union, else none"""
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
    def frame(self) -> tuple[int, int]:
        return (0, 0) if self.rule == "rank_union" else super().frame

    @property
    def cut(self) -> Rule:
        if self.rule == "rank_union":
            sinks, recent = 4 if self.sinks is None else self.sinks, 0.25 if self.recent is None else self.recent
            return RankUnion(budget=self.tokens, sinks=sinks, recent=recent)
        return super().cut

    @property
    def framed_rule(self) -> FrameableRule:
        if self.ratio is not None:
            minimum = max(self.min_pages or 1, self.frame_units)
            return Ratio(self.ratio, minimum=minimum, local=self.local_pages or 1)
        return super().framed_rule

    @property
    def selector(self) -> Selector:
        shared = (self.pooling or "max") if self.grouping == "kv" else "each"
        pooling: Pooling = "each" if shared == "mass" else shared
        scorer = ExactScorer(pooling, self.unit) if self.scorer == "exact" else PageBoundScorer(self.unit, pooling)
        return (MassSelector if shared == "mass" else ScoredSelector)(scorer, self.cut, self.grouping)

    def model_post_init(self, context: object, /) -> None:
        """Refuse what makes no sense together; the first reason that there is."""
        super().model_post_init(context)
        for reason in self._reasons():
            raise ValueError(reason)

    def _reasons(self) -> Iterator[str]:
        rule, scorer, heads, pooling = self.rule, self.scorer, self.grouping, self.pooling
        for name, (option, owner) in OWNERS.items():
            value, held = getattr(self, name), getattr(self, option)
            if value is not None and held != owner:
                yield f"{name}={value} belongs to {option}={owner}, but the {option} is {held}"
        if self.window is not None and rule == "rank_union":
            yield f"window={self.window} does not fit rule=rank_union, whose window is a share: recent"
        if scorer != "exact" and rule in ("top_p", "threshold"):
            yield f"rule={rule} needs scorer=exact: {scorer} gives upper bounds, which are no probabilities"
        smallest = (units_of(4 if self.sinks is None else self.sinks, self.unit) + 2) * self.unit
        if rule == "rank_union" and self.unit > 1 and self.tokens < smallest:
            yield f"budget={self.budget} does not hold rank_union's pages of {self.unit}; the smallest is {smallest}"
        if pooling == "mass" and rule in ("top_p", "threshold"):
            yield f"pooling=mass does not fit rule={rule}, which makes a softmax of scores itself"
        if rule == "rank_union" and heads != "all":
            yield f"heads={heads} does not fit rule=rank_union, which makes one set for all heads"
        if rule != "rank_union" and heads == "all":
            yield f"heads=all needs rule=rank_union: rule={rule} does not merge the heads' scores"
        if pooling is not None and heads != "kv":
            yield f"pooling={pooling} needs heads=kv: with heads={heads} no group shares a score"
        of_layers = self.roles == "select" or self.roles.startswith(("every:", "layers:"))
        if self.dense_layers is not None and not of_layers:
            yield f"dense_layers={self.dense_layers} does not fit roles={self.roles}, which speaks of every layer"


def plan(options: ComposedOptions, shape: ModelShape) -> Plan:
    """What the options say; publishers whose scorer dense attention does not compute refresh from the index."""
    if options.roles == "select":
        return Plan(options.selector, layer_roles(shape, options.dense_layers))
    dense_layers = 2 if options.dense_layers is None else options.dense_layers
    return Plan(options.selector, *roles_of(options.roles, shape, dense_layers))


METHOD = Method(
    "composed", "any scorer with any rule and any roles", "-", ComposedOptions, plan, compared=False, tuned=()
)
