"""The layers at which a policy may select again: what a search tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..adapters.hf.support import refuse_rewinding
from ..errors import SaccadeError
from ..eval.entry import parse_budgets
from ..methods.policy import Policy
from ..methods.registry import policies
from ..plans.plan import candidates
from ..types import ModelShape

Candidate = tuple[int, ...]
"""Layers that select again, beside the first that selects."""


@dataclass(frozen=True, slots=True)
class Reselecting:
    """A policy whose further selection layers are looked for, at some budgets, on a model."""

    policy: Policy
    budgets: tuple[int, ...]
    shape: ModelShape

    @classmethod
    def check(cls, spec: str, budgets: str, shape: ModelShape) -> Reselecting:
        """Resolve what the user has written, or raise a SaccadeError: one line about the first that is not valid."""
        policy = Policy.from_spec(spec)
        if "reselect" not in type(policy.options).model_fields:
            valid = (name for name, method in policies().items() if "reselect" in method.defaults)
            raise SaccadeError(f"--policy {spec!r} has no re-selection layer; valid: {', '.join(valid)}")
        if {"reselect", "budget"} & policy.options.model_fields_set:
            raise SaccadeError(f"--policy {spec!r}: reselect and budget are what is searched; leave them out")
        found = cls(policy, tuple(sorted(parse_budgets(budgets))), shape)
        for tried in found.specs(found.candidates):
            Policy.from_spec(tried).plan(shape)
        refuse_rewinding(policy, shape)
        return found

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What is tried first."""
        return candidates(self.shape, int(self.policy.options.model_dump()["dense_layers"]))

    def wider(self, chosen: Candidate) -> list[Candidate]:
        """Those with one layer more."""
        return [tuple(sorted({*chosen, layer})) for (layer,) in self.candidates[1:] if layer not in chosen]

    def specs(self, candidates: Sequence[Candidate]) -> list[str]:
        """The policy with each candidate at each budget."""
        given, name = self.policy.options.model_dump(exclude_unset=True), self.policy.name
        pairs = ({"reselect": candidate, "budget": budget} for candidate in candidates for budget in self.budgets)
        return [Policy.create(name, {**given, **pair}).to_spec() for pair in pairs]


def name(reselect: Sequence[int]) -> str:
    """What a candidate is called in results."""
    return "+".join(map(str, reselect)) or "none"
