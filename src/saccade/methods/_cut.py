"""The options that choose a rule for exact scores, shared by the methods that have them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..selection.rules import Framed, Ratio, Threshold, TopK, TopP
from ..selection.rules.framed import FrameableRule, units_of
from ..selection.selector import Rule
from .options import DEFAULT_BUDGET, AtLeastOne, Number, Options, Share, Sinks, Window

VALUES = {"top_p": "0 < top_p <= 1", "threshold": "0 < threshold < 1", "ratio": "0 < ratio <= 1"}
"""Rules that need a value; it is given by the option of the same name."""


class CutOptions(Options):
    """Which rule cuts the scores into a set, and its value (LycheeDecode, section 4.4.1)."""

    budget: AtLeastOne | None = DEFAULT_BUDGET
    """tokens a sparse head attends to, the current one included; at most so many if the rule varies"""
    rule: Literal["top_k", "top_p", "threshold", "ratio"] = "top_k"
    """how scores become a set: top_k fills the budget; top_p and threshold vary within it; ratio grows with the row"""
    top_p: Share | None = None
    """rule=top_p: attention mass that the set must reach"""
    threshold: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), Number] | None = None
    """rule=threshold: probability that a token must exceed"""
    ratio: Share | None = None
    """rule=ratio: share of the row that is kept"""
    sinks: Sinks | None = None
    """first tokens that are in every set, inside the budget; not given: none"""
    window: Window | None = None
    """last tokens that are in every set, inside the budget; not given: the current one"""

    @property
    def budgeted(self) -> bool:
        return self.rule != "ratio"

    @property
    def tokens(self) -> int:
        """The budget of a rule that has one."""
        assert self.budget is not None, "only a ratio has no budget, and no use for it"
        return self.budget

    @property
    def unit(self) -> int:
        """Tokens of a page that the rule chooses among."""
        return 1

    @property
    def frame(self) -> tuple[int, int]:
        """Sinks and window, in tokens."""
        return self.sinks or 0, self.window or 0

    @property
    def cut(self) -> Rule:
        rule = self.framed_rule
        return Framed(rule, *self.frame) if any(self.frame) else rule

    @property
    def framed_rule(self) -> FrameableRule:
        """The rule without its frame, which the smallest set of a ratio holds."""
        if self.top_p is not None:
            return TopP(self.top_p, buffer=self.tokens)
        if self.threshold is not None:
            return Threshold(self.threshold, buffer=self.tokens)
        if self.ratio is not None:
            return Ratio(self.ratio, minimum=self.frame_units)
        return TopK(self.tokens)

    @property
    def frame_units(self) -> int:
        """Pages that sinks and window take, the current one included."""
        sinks, window = self.frame
        return units_of(sinks, self.unit) + max(units_of(window, self.unit), 1)

    def model_post_init(self, context: object, /) -> None:
        """Refuse a rule without its value, another rule's value, and a budget that no rule uses; once, at birth."""
        rule: str = self.rule
        for name, valid in VALUES.items():
            value = getattr(self, name)
            if value is not None and rule != name:
                raise ValueError(f"{name}={value} belongs to rule={name}, but the rule is {rule}")
            if value is None and rule == name:
                raise ValueError(f"rule={rule} needs its value: {valid}")
        if self.budgeted:
            if self.budget is None:
                raise ValueError("budget=None is not valid: must be a whole number")
        elif self.budget is not None:
            if "budget" in self.model_fields_set:
                raise ValueError(f"budget={self.budget} is not valid: rule={rule} grows with the row and has no budget")
            # The default is another rule's; what is written down must read back as what was meant.
            object.__setattr__(self, "budget", None)
        else:
            self.model_fields_set.discard("budget")

    @model_validator(mode="after")
    def _holds_what_it_keeps(self) -> CutOptions:
        """Refuse pages that the rule cannot choose among, and a budget that does not hold what is always kept."""
        page = self.unit
        if page > 1 and self.rule in ("top_p", "threshold"):
            raise ValueError(
                f"rule={self.rule} needs exact scores of single tokens: a page of {page} tokens has no probability"
            )
        if self.budgeted and self.tokens < page:
            raise ValueError(f"budget={self.budget} does not hold one page of {page}; the smallest is {page}")
        if self.budgeted and self.tokens // page < self.frame_units:
            told = "does not hold sinks={} and window={}".format(*self.frame)
            raise ValueError(f"budget={self.budget} {told}; the smallest is {self.frame_units * page}")
        return self
