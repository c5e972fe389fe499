"""LycheeDecode (Lin et al., 2026, arXiv 2602.04541): a few heads retrieve, the others reuse the set of their index."""

from __future__ import annotations

from pydantic import model_validator

from ..errors import PolicyError
from ..plans.plan import Plan
from ..selection.rules import Ratio
from ..selection.rules.framed import FrameableRule, frame_of
from ..selection.scorers.exact import ExactScorer
from ..selection.selector import ScoredSelector
from ..types import ModelShape, Role
from ._cut import CutOptions
from ._roles import roles_of
from .method import Known, Method, Usual
from .options import Page, RectifyField, Roles, Sinks, Window


class LycheeDecodeOptions(CutOptions):
    """Options of `lychee_decode`: sets per KV head by the group's mean query (section 3.2, appendix F).

    Sinks and window are those of the authors' code, in shares of the set so that small budgets stay legal.
    """

    _since = ("sinks", 0), ("window", 0)

    roles: Roles | None = None
    """role file; or heads:0+7.2, layer 0 and KV head 2 of layer 7 retrieve, others reuse; layers:0+7; every:N"""
    page: Page = 1
    """tokens per selection page: 1, or 64 as in the paper's speed path (section 4.3)"""
    sinks: Sinks | None = None
    """first tokens that are in every set, inside its size k; neither these nor a window given: min(128, k / 8) with
    top_k and ratio, else none; sinks=0,window=0 is the paper's letter"""
    window: Window | None = None
    """last tokens that are in every set; neither these nor sinks given: min(256, k / 4) with top_k and ratio, else the
    current one"""
    rectify: RectifyField = None

    @property
    def unit(self) -> int:
        return self.page

    @property
    def unframed(self) -> bool:
        """Whether nobody has named a frame, so that it is that of the authors' code."""
        return self.sinks is self.window is None

    @property
    def frame(self) -> tuple[int, int]:
        return frame_of(self.tokens, self.page) if self.unframed and self.rule == "top_k" else super().frame

    @property
    def framed_rule(self) -> FrameableRule:
        if self.ratio is not None and self.unframed:
            return Ratio(self.ratio, framed=True)
        return super().framed_rule

    @model_validator(mode="after")
    def _fits(self) -> LycheeDecodeOptions:
        if self.roles is None:
            raise ValueError(
                "it needs a role file: make one with `saccade calibrate heads --model ...` "
                "(or try roles=every:4, a stand-in that nobody calibrated)"
            )
        return self


def plan(options: LycheeDecodeOptions, shape: ModelShape) -> Plan:
    """Retrieval heads attend densely and publish; sparse heads attend to what their head index below has published."""
    assert options.roles is not None, "refused at construction"
    roles, notes = roles_of(options.roles, shape, dense_layers=0)
    first = roles.concerned[0]
    for head, role in enumerate(roles.layers[first]):
        if role is not Role.PUBLISH:
            raise PolicyError(
                f"roles={options.roles} is not valid: KV head {head} of layer {first} is {role.value}, "
                f"but all heads of layer {first} must publish"
            )
    return Plan(ScoredSelector(ExactScorer("mean", options.page), options.cut), roles, notes)


def usual(known: Known) -> Usual:
    """Without retrieval heads whole layers stand in: layer 0, as in the paper, and `tidal`'s; or each fourth."""
    if known.roles is not None:
        return Usual({"roles": known.roles})
    layers = None if known.reselect is None else "+".join(map(str, sorted({*known.first[::2], *known.reselect})))
    note = "whole layers stand in for its retrieval heads, which nobody has calibrated for this model"
    return Usual({"roles": f"layers:{layers}" if layers else "every:4"}, calibrated=False, note=note)


METHOD = Method(
    "lychee_decode",
    "a few retrieval heads select tokens, the other heads reuse them",
    "LycheeDecode, arXiv 2602.04541",
    LycheeDecodeOptions,
    plan,
    usual,
)
