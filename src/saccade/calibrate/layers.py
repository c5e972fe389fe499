"""Which layers re-select: every candidate tried on the task, beside what one dense pass says (Tidal, app. A.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy
from scipy.stats import binomtest, spearmanr

from ..checkpoints.shape import shape_of_model
from ..errors import SaccadeError
from ..eval.entry import parse_budgets
from ..methods.policy import Policy
from ..methods.registry import policies
from ..recipes.recipe import Recipe
from .asking import Reading
from .gold import GoldObserver
from .ledger import Ledger
from .problems import Problems
from .proxy import ProxyObserver, predicted
from .sweep import Outcome, Sweep
from .target import Target, TargetSettings

PASSES, RESULTS = "dense_passes.jsonl", "layers.json"
ENOUGH = 0.99
"""Share of dense attention's right answers that the recipe's budget must reach, if one of those searched does."""


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What the user can choose; see `saccade calibrate layers --help`."""

    common: TargetSettings
    policy: str
    budgets: str
    most: int


@dataclass(frozen=True)
class LayerSearch:
    """A checked search; `run` it, then read `results`.

    Attributes:
        target: model and task.
        policy: which policy's re-selection is searched.
        budgets: in tokens.
        most: how many layers may be chosen.
        problems: what is asked.
    """

    target: Target
    policy: Policy
    budgets: tuple[int, ...]
    most: int
    problems: Problems

    @classmethod
    def check(cls, settings: LayerSettings) -> LayerSearch:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        policy = Policy.from_spec(settings.policy)
        if "reselect" not in type(policy.options).model_fields:
            valid = (name for name, method in policies().items() if "reselect" in method.defaults)
            raise SaccadeError(f"--policy {settings.policy!r} has no re-selection layer; valid: {', '.join(valid)}")
        if {"reselect", "budget"} & policy.options.model_fields_set:
            raise SaccadeError(
                f"--policy {settings.policy!r}: reselect and budget are what is searched; leave them out"
            )
        target = Target.check(settings.common)
        search = cls(target, policy, tuple(sorted(parse_budgets(settings.budgets))), settings.most, target.problems())
        for spec in search.specs(search.candidates):
            Policy.from_spec(spec).plan(target.subject.shape)
        return search

    @property
    def first(self) -> int:
        """The layer where a set is chosen whatever is searched."""
        return int(self.policy.options.model_dump()["dense_layers"])

    @property
    def candidates(self) -> tuple[tuple[int, ...], ...]:
        """What is tried first: no further layer, then each one above the first selection layer."""
        return ((), *((layer,) for layer in range(self.first + 1, self.target.subject.shape.layers)))

    def spec(self, reselect: Sequence[int], budget: int) -> str:
        options = {**self.policy.options.model_dump(exclude_unset=True), "reselect": tuple(reselect), "budget": budget}
        return Policy.create(self.policy.name, options).to_spec()

    def specs(self, candidates: Sequence[Sequence[int]]) -> list[str]:
        return [self.spec(reselect, budget) for reselect in candidates for budget in self.budgets]

    @property
    def units(self) -> int:
        """Pieces of work of a whole run: one dense pass per text, and one per candidate, budget and text."""
        rounds = 1 + len(self.candidates) * len(self.budgets) * self.most
        return len(self.problems) * (1 + rounds)

    def run(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Search, write the results and the recipe; what the folder already holds is not done again."""
        model = self.target.subject.load()
        earlier = self.target.earlier(shape_of_model(model))
        proxies = self._proxies(self._dense_passes(model, advance))
        with self.target.sweep(model, self.problems, policy=str(self.policy)) as sweep:
            sweep.run(["dense", *self.specs(self.candidates)], advance)
            dense = sweep.outcome("dense")
            tried = {reselect: self._outcomes(sweep, reselect) for reselect in self.candidates}
            chosen = max(tried, key=lambda reselect: _merit(tried[reselect]))
            steps = []
            for _ in range(self.most - len(chosen)):
                wider = [tuple(sorted({*chosen, layer})) for (layer,) in self.candidates[1:] if layer not in chosen]
                if not wider:
                    break
                sweep.run(self.specs(wider), advance)
                tried |= {reselect: self._outcomes(sweep, reselect) for reselect in wider}
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
            for budget, outcome in zip(self.budgets, outcomes, strict=True)
        ]
        results = {
            "policy": str(self.policy),
            "budgets": list(self.budgets),
            "texts": len(self.problems),
            "dense": dense.to_dict(),
            "rows": rows,
            "chosen": list(chosen),
            "further_layers": steps,
            **proxies,
            "rank_correlation": self._correlations(tried, proxies),
        }
        written = self.target.write_results(RESULTS, results)
        self._recipe(dense, tried[chosen], replace(earlier, reselect=chosen))
        return written

    def _outcomes(self, sweep: Sweep, reselect: Sequence[int]) -> list[Outcome]:
        return [sweep.outcome(self.spec(reselect, budget)) for budget in self.budgets]

    def _dense_passes(self, model: Any, advance: Callable[[str], None]) -> list[dict[str, Any]]:
        """One dense pass over every text's questions: where gold mass lies, and how far sets would carry."""
        target, shape = self.target, self.target.subject.shape
        about = {**target.about(), "policy": str(self.policy), "texts": len(self.problems)}
        plans = [Policy.from_spec(self.spec((), budget)).plan(shape) for budget in self.budgets]
        path = target.settings.output_dir / PASSES
        with Ledger(path, {**about, "budgets": list(self.budgets)}, ("problem",)) as passes:
            for number in range(len(self.problems)):
                if passes.has(number):
                    continue
                problem = self.problems[number]
                gold = GoldObserver(shape.layers, shape.query_heads, problem.tokens)
                proxy = ProxyObserver(plans, shape.layers)
                Reading(model, problem).observe(gold, proxy)
                passes.add(
                    {
                        "problem": number,
                        "gold_mass": gold.mass.tolist(),
                        "copies": gold.copies.tolist(),
                        "gold_steps": gold.steps,
                        "mass": proxy.mass.tolist(),
                        "overlap": proxy.overlap.tolist(),
                        "weights": proxy.weights.tolist(),
                    }
                )
                advance("dense pass")
            return [passes.get(number) for number in range(len(self.problems))]

    def _proxies(self, passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The dense passes of all texts as one, and what each candidate would reach by them."""
        gold, masses, overlaps, weights = (
            numpy.sum([one[name] for one in passes], axis=0) for name in ("gold_mass", "mass", "overlap", "weights")
        )
        steps = sum(one["gold_steps"] for one in passes)
        recall, overlap = (
            {_name(one): predicted(values, weights, self.first, one) for one in self.candidates}
            for values in (masses, overlaps)
        )
        heads = gold / max(steps, 1)
        return {
            "gold_mass_per_head": heads.tolist() if steps else None,
            "gold_mass": heads.max(1).tolist() if steps else None,
            "predicted_recall": recall,
            "predicted_overlap": overlap,
        }

    def _correlations(self, tried: dict[tuple[int, ...], list[Outcome]], proxies: dict[str, Any]) -> dict[str, Any]:
        """Spearman's rank correlation over single layers, of each proxy with what the search has measured."""
        single = self.candidates[1:]
        if not single:  # a model whose only layer above the dense ones is the first selecting one
            return {}
        accuracy = [fmean(outcome.accuracy for outcome in tried[one]) for one in single]
        recall = [fmean(fmean(outcome.recall) for outcome in tried[one]) for one in single]
        guesses = {
            "predicted_recall": [fmean(proxies["predicted_recall"][_name(one)]) for one in single],
            "predicted_overlap": [fmean(proxies["predicted_overlap"][_name(one)]) for one in single],
        }
        if proxies["gold_mass"] is not None:
            guesses["gold_mass"] = [proxies["gold_mass"][layer] for (layer,) in single]
        return {
            name: {
                "with_accuracy": _spearman(values, accuracy),
                "with_recall": _spearman(values, recall),
                "its_best": single[int(numpy.argmax(values))][0],
            }
            for name, values in guesses.items()
        }

    def _recipe(self, dense: Outcome, outcomes: Sequence[Outcome], recipe: Recipe) -> None:
        """Write the layers, and the policy at the smallest budget that kept the answers; earlier roles stay.

        Raises:
            SaccadeError: if nothing was answered, so that nothing was found.
        """
        self.target.refuse_unanswered(
            dense.correct, dense.count, "no layer can be told from another and there is no recipe"
        )
        enough = [o for o in outcomes if o.correct >= ENOUGH * dense.correct]
        best = enough[0] if enough else max(outcomes, key=lambda outcome: outcome.correct)
        self.target.write_recipe(
            "calibrate layers",
            replace(recipe, policy=Policy.from_spec(best.spec)),
            found={"policy": str(self.policy), "budgets": list(self.budgets)},
            scores={one.spec: [one.correct, one.count] for one in (dense, best)},
        )


def _merit(outcomes: Sequence[Outcome]) -> tuple[int, float]:
    """Right answers over all budgets, then recall: what candidates are ranked by."""
    return sum(outcome.correct for outcome in outcomes), fmean(fmean(outcome.recall) for outcome in outcomes)


def _one_sided(better: Sequence[Outcome], worse: Sequence[Outcome]) -> float:
    """Exact sign test that the first is no better; a question counts once, by how many budgets it is right at."""
    ours, theirs = _times_right(better), _times_right(worse)
    gained = sum(one > other for one, other in zip(ours, theirs, strict=True))
    lost = sum(one < other for one, other in zip(ours, theirs, strict=True))
    return float(binomtest(gained, gained + lost, alternative="greater").pvalue) if gained + lost else 1.0


def _times_right(outcomes: Sequence[Outcome]) -> list[int]:
    """Question by question, at how many budgets it is right."""
    flat = ([right for text in outcome.right for right in text] for outcome in outcomes)
    return [sum(one) for one in zip(*flat, strict=True)]


def _spearman(values: Sequence[float], measured: Sequence[float]) -> float | None:
    """None where one side is constant, so that nothing has a rank."""
    if len(set(values)) < 2 or len(set(measured)) < 2:
        return None
    return float(spearmanr(values, measured).statistic)


def _name(reselect: Sequence[int]) -> str:
    return "+".join(map(str, reselect)) or "none"
