"""Which layers re-select, by questions: every candidate tried on a task (Tidal, app. A.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from scipy.stats import binomtest

from ..checkpoints.shape import shape_of_model
from ..decode.recall import MeanRecall
from ..methods.policy import Policy
from ..recipes.recipe import Recipe
from .problems import Problems
from .reselecting import Candidate, Reselecting
from .sweep import Outcome, Sweep
from .target import Target, TargetSettings

RESULTS = "layers.json"
ENOUGH = 0.99
"""Ratio of accuracies, to dense attention's, that the recipe's budget must reach, if one of those searched does."""


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What the user can choose; see `saccade calibrate layers --help`."""

    common: TargetSettings
    policy: str
    budgets: str
    most: int


@dataclass(frozen=True)
class LayerSearch:
    """A checked search for at most so many layers where a policy selects again; `run` it."""

    target: Target
    layers: Reselecting
    most: int
    problems: Problems

    @classmethod
    def check(cls, settings: LayerSettings) -> LayerSearch:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        target = Target.check(settings.common)
        layers = Reselecting.check(settings.policy, settings.budgets, target.subject.shape)
        return cls(target, layers, settings.most, target.problems())

    @property
    def units(self) -> int:
        """Pieces of work of a whole run: one per candidate, budget and text, and the dense answers."""
        return len(self.problems) * (1 + len(self.layers.specs(self.layers.candidates)) * self.most)

    def run(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Search, write the results and the recipe; what the folder already holds is not done again."""
        model = self.target.subject.load()
        earlier = self.target.earlier(shape_of_model(model))
        layers = self.layers
        with self.target.sweep(model, self.problems, policy=str(layers.policy)) as sweep:
            sweep.run(["dense", *layers.specs(layers.candidates)], advance)
            dense, tried, steps = sweep.outcome("dense"), self._outcomes(sweep, layers.candidates), []
            chosen = max(tried, key=lambda reselect: _merit(tried[reselect]))
            for _ in range(self.most - len(chosen)):
                wider = layers.wider(chosen)
                if not wider:
                    break
                sweep.run(layers.specs(wider), advance)
                tried |= self._outcomes(sweep, wider)
                best = max(wider, key=lambda reselect: _merit(tried[reselect]))
                # As many pairs were tried, and the best one is tested (Bonferroni).
                p = min(_one_sided(tried[best], tried[chosen]) * len(wider), 1.0)
                steps.append({"from": chosen, "to": best, "p": p, "taken": p < 0.05})
                if p >= 0.05:
                    break
                chosen = best
        rows = [
            {"reselect": list(reselect), "budget": budget, **outcome.to_dict()}
            for reselect, outcomes in tried.items()
            for budget, outcome in zip(layers.budgets, outcomes, strict=True)
        ]
        results = {
            "policy": str(layers.policy),
            "budgets": list(layers.budgets),
            "texts": len(self.problems),
            "dense": dense.to_dict(),
            "rows": rows,
            "chosen": list(chosen),
            "further_layers": steps,
        }
        written = self.target.write_results(RESULTS, results)
        self._recipe(dense, tried[chosen], replace(earlier, reselect=chosen))
        return written

    def _outcomes(self, sweep: Sweep, candidates: Sequence[Candidate]) -> dict[Candidate, list[Outcome]]:
        return {one: [sweep.outcome(spec) for spec in self.layers.specs([one])] for one in candidates}

    def _recipe(self, dense: Outcome, outcomes: Sequence[Outcome], recipe: Recipe) -> None:
        """Write the layers, and the policy at the smallest budget that kept the answers; roles, a tuned policy stay."""
        consequence = "no layer can be told from another and there is no recipe"
        self.target.refuse_unanswered(dense.correct, dense.count, consequence)
        enough = [o for o in outcomes if o.correct >= ENOUGH * dense.correct]
        best = enough[0] if enough else max(outcomes, key=lambda outcome: outcome.correct)
        found = {"policy": str(self.layers.policy), "budgets": list(self.layers.budgets)}
        scores = {one.spec: [one.correct, one.count] for one in (dense, best)}
        known = recipe if recipe.tuned else replace(recipe, policy=Policy.from_spec(best.spec))
        self.target.write_recipe("calibrate layers", known, found=found, scores=scores)


def _merit(outcomes: Sequence[Outcome]) -> tuple[int, float]:
    """Right answers over all budgets, then recall: what candidates are ranked by."""
    return sum(outcome.correct for outcome in outcomes), _recall(outcomes)


def _recall(outcomes: Sequence[Outcome]) -> float:
    """Attention recall over heads with a set; a candidate without any misses nothing."""
    means = [MeanRecall.of_parts(outcome.recalls) for outcome in outcomes]
    return fmean(1.0 if mean is None or mean.attention is None else mean.attention for mean in means)


def _one_sided(better: Sequence[Outcome], worse: Sequence[Outcome]) -> float:
    """Exact sign test that the first is no better; a question counts once, by how many budgets it is right at."""
    pairs = list(zip(_times_right(better), _times_right(worse), strict=True))
    gained, lost = sum(one > other for one, other in pairs), sum(one < other for one, other in pairs)
    return float(binomtest(gained, gained + lost, alternative="greater").pvalue) if gained + lost else 1.0


def _times_right(outcomes: Sequence[Outcome]) -> list[int]:
    """Question by question, at how many budgets it is right."""
    flat = ([right for text in outcome.right for right in text] for outcome in outcomes)
    return [sum(one) for one in zip(*flat, strict=True)]
