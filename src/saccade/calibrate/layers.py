"""Which layers re-select: every candidate tried on the task, beside what one dense pass says (Tidal, app. A.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy
from scipy.stats import binomtest, spearmanr

from ..adapters.hf.support import refuse_rewinding
from ..checkpoints.shape import shape_of_model
from ..decode.recall import MeanRecall
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

Candidate = tuple[int, ...]

PASSES, RESULTS = "dense_passes.jsonl", "layers.json"
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
            what = "reselect and budget are what is searched; leave them out"
            raise SaccadeError(f"--policy {settings.policy!r}: {what}")
        target = Target.check(settings.common)
        search = cls(target, policy, tuple(sorted(parse_budgets(settings.budgets))), settings.most, target.problems())
        for spec in search.specs(search.candidates):
            Policy.from_spec(spec).plan(target.subject.shape)
        refuse_rewinding(policy, target.subject.shape)
        return search

    @property
    def first(self) -> int:
        """The layer where a set is chosen whatever is searched."""
        return self._selecting[0]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What is tried first: no further layer, then each one above the first selection layer."""
        return ((), *((layer,) for layer in self._selecting[1:]))

    @property
    def _selecting(self) -> tuple[int, ...]:
        """Layers with full attention above the dense ones, as the model counts them."""
        return self.target.subject.shape.full_layers[int(self.policy.options.model_dump()["dense_layers"]) :]

    def specs(self, candidates: Sequence[Candidate]) -> list[str]:
        """The policy with each candidate at each budget."""
        given, name = self.policy.options.model_dump(exclude_unset=True), self.policy.name
        pairs = ({"reselect": candidate, "budget": budget} for candidate in candidates for budget in self.budgets)
        return [Policy.create(name, {**given, **pair}).to_spec() for pair in pairs]

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
            dense, tried, steps = sweep.outcome("dense"), self._outcomes(sweep, self.candidates), []
            chosen = max(tried, key=lambda reselect: _merit(tried[reselect]))
            for _ in range(self.most - len(chosen)):
                wider = [tuple(sorted({*chosen, layer})) for (layer,) in self.candidates[1:] if layer not in chosen]
                if not wider:
                    break
                sweep.run(self.specs(wider), advance)
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

    def _outcomes(self, sweep: Sweep, candidates: Sequence[Candidate]) -> dict[Candidate, list[Outcome]]:
        return {one: [sweep.outcome(spec) for spec in self.specs([one])] for one in candidates}

    def _dense_passes(self, model: Any, advance: Callable[[str], None]) -> list[dict[str, Any]]:
        """One dense pass over every text's questions: where gold mass lies, and how far sets would carry."""
        target, shape, texts = self.target, self.target.subject.shape, len(self.problems)
        about = {**target.about(), "policy": str(self.policy), "texts": texts, "budgets": list(self.budgets)}
        about["rows"] = rows = target.rows(model, self.problems)
        plans = [Policy.from_spec(spec).plan(shape) for spec in self.specs([()])]
        with Ledger(target.settings.output_dir / PASSES, about, ("problem",)) as passes:
            for number in range(texts):
                if (number,) in passes.records:
                    continue
                problem = self.problems[number]
                gold = GoldObserver(shape.layers, shape.query_heads, problem.tokens, first=shape.full_layers[0])
                proxy = ProxyObserver(plans, shape.layers)
                Reading(model, problem, rows).observe(gold, proxy)
                found = {"problem": number, "gold_mass": gold.mass.tolist(), "copies": gold.copies.tolist()}
                carried = {name: getattr(proxy, name).tolist() for name in ("mass", "overlap", "weights")}
                passes.add({**found, "gold_steps": gold.steps, **carried})
                advance("dense pass")
            return [passes.records[number,] for number in range(texts)]

    def _proxies(self, passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The dense passes of all texts as one, and what each candidate would reach by them."""
        gold, masses, overlaps, weights = (
            numpy.sum([one[name] for one in passes], axis=0) for name in ("gold_mass", "mass", "overlap", "weights")
        )
        steps = sum(one["gold_steps"] for one in passes)
        heads = gold / max(steps, 1)
        found = {"gold_mass_per_head": heads, "gold_mass": heads.max(1)}
        return {what: values.tolist() if steps else None for what, values in found.items()} | {
            what: {name(one): predicted(values, weights, self.first, one) for one in self.candidates}
            for what, values in (("predicted_recall", masses), ("predicted_overlap", overlaps))
        }

    def _correlations(self, tried: Mapping[Candidate, Sequence[Outcome]], proxies: dict[str, Any]) -> dict[str, Any]:
        """Spearman's rank correlation over single layers, of each proxy with what the search has measured."""
        single = self.candidates[1:]
        if not single:  # a model whose only layer above the dense ones is the first selecting one
            return {}
        accuracy = [fmean(outcome.accuracy for outcome in tried[one]) for one in single]
        recall = [_recall(tried[one]) for one in single]
        predictions = ("predicted_recall", "predicted_overlap")
        guesses = {what: [fmean(proxies[what][name(one)] or (1.0,)) for one in single] for what in predictions}
        if proxies["gold_mass"] is not None:
            guesses["gold_mass"] = [proxies["gold_mass"][layer] for (layer,) in single]
        return {
            what: {"with_accuracy": _spearman(values, accuracy), "with_recall": _spearman(values, recall),
                   "its_best": single[int(numpy.argmax(values))][0]}
            for what, values in guesses.items()
        }  # fmt: skip

    def _recipe(self, dense: Outcome, outcomes: Sequence[Outcome], recipe: Recipe) -> None:
        """Write the layers, and the policy at the smallest budget that kept the answers; roles, a tuned policy stay."""
        consequence = "no layer can be told from another and there is no recipe"
        self.target.refuse_unanswered(dense.correct, dense.count, consequence)
        enough = [o for o in outcomes if o.correct >= ENOUGH * dense.correct]
        best = enough[0] if enough else max(outcomes, key=lambda outcome: outcome.correct)
        found = {"policy": str(self.policy), "budgets": list(self.budgets)}
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


def _spearman(values: Sequence[float], measured: Sequence[float]) -> float | None:
    """None where one side is constant, so that nothing has a rank."""
    if len(set(values)) < 2 or len(set(measured)) < 2:
        return None
    return float(spearmanr(values, measured).statistic)


def name(reselect: Sequence[int]) -> str:
    """What a candidate is called in results."""
    return "+".join(map(str, reselect)) or "none"
