"""`saccade tune`: the cheapest policy whose accuracy is at least a share of dense attention's, with 95% confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, takewhile
from typing import Any

import numpy
import torch

from ..checkpoints.shape import parameters_read, shape_of_model
from ..errors import SaccadeError
from ..eval.entry import parse_budgets
from ..methods.policy import Policy
from ..plans.cost import cost_of
from ..recipes.recipe import Recipe
from .candidates import families, ladder, rungs
from .layers import LayerSearch, LayerSettings
from .problems import Beginning, NeedleProblems, Problems, needles_in
from .promise import ALPHA, MARGIN, Marks, best_shown, cheapest, judge, texts_needed, walk
from .sweep import Outcome, Sweep
from .target import ASKED, TUNING, Target, TargetSettings
from .task_file import FileProblems
from .timing import time_per_token

Ladders = Mapping[str, Mapping[str, float]]
"""Bytes per token of every family's specs, most expensive first."""

RESULTS, SEARCH = "tune.json", "layers"
SEARCHED_QUESTIONS = 96
PARTS, FEWEST = (16, 4, 1), 8
"""After which parts of the texts, and of how many at least, candidates are left out that can no longer pass."""


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What the user can choose; see `saccade tune --help`. `common.questions` 0: as many as the promise needs."""

    common: TargetSettings
    quality: float
    policies: tuple[str, ...]
    budgets: str | None
    batch: int
    measure: bool
    full: bool


@dataclass(frozen=True)
class Tuning:
    """A checked tuning; `run` it.

    Attributes:
        budgets: largest first.
        problems: every one of another text.
        known: what is known of the model before any weight is read.
        search: for re-selection layers, if none are known and none were named.
        most_families: how many there will be, at most: a layer that is searched gives three more.
    """

    settings: TuneSettings
    target: Target
    budgets: tuple[int, ...]
    problems: Problems
    known: Recipe
    search: LayerSearch | None
    most_families: int

    @classmethod
    def check(cls, settings: TuneSettings) -> Tuning:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        quality = settings.quality
        if not 0 < quality < 1:
            raise SaccadeError(f"--quality {quality:g} is not valid: above 0 and below 1, such as 0.99")
        if settings.measure and settings.batch > 1:
            raise SaccadeError(f"--batch {settings.batch} does not fit --measure, which times single rows")
        target = Target.check(settings.common)
        known = target.earlier(target.subject.shape)
        # A file has one set of texts: what chose a layer must not judge it.
        searches = not settings.policies and known.reselect is None and not target.from_file
        most = len(families(known, settings.policies)) + 3 * searches
        named = () if settings.budgets is None else parse_budgets(settings.budgets)
        target, problems = _texts(target, quality, most)
        common = target.settings
        budgets = named or ladder(common.context)
        search = None
        if searches:
            folder = common.output_dir / SEARCH
            questions = min(SEARCHED_QUESTIONS, common.questions)
            other = replace(common, output_dir=folder, recipe=None, questions=questions)
            search = LayerSearch.check(LayerSettings(other, "tidal", ",".join(map(str, budgets)), 1))
        tuning = cls(settings, target, tuple(sorted(budgets, reverse=True)), problems, known, search, most)
        for family in families(known, settings.policies):
            for policy in rungs(family, tuning.budgets, common.context):
                policy.plan(target.subject.shape)
        return tuning

    @property
    def design(self) -> str:
        """What will be asked, and what that can show at best, in one line."""
        texts, asked = len(self.problems), len(self.problems[0].asks)
        shown = best_shown(texts, asked, self.most_families)
        return (
            f"asking {texts:,} texts {asked} questions each; that shows a ratio of accuracies of {shown:.4f} at best, "
            f"if a candidate loses no answer (families: {self.most_families})"
        )

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, at most."""
        asked = len(self.problems) * (1 + self.most_families * len(self.budgets))
        return asked + (self.search.units if self.search else 0)

    def run(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Try, judge, choose; write results and the recipe."""
        if self.search is not None:
            self.search.run(advance)
        model = self.target.subject.load()
        recipe = self.target.earlier(shape_of_model(model))
        if self.search is not None:
            searched = Recipe.read(self.search.target.recipe_path)
            found, scores = {**recipe.found, **searched.found}, {**recipe.scores, **searched.scores}
            recipe = replace(recipe, reselect=searched.reselect, found=found, scores=scores)
        ladders, dense_bytes = self._ladders(model, recipe)
        with self.target.sweep(model, self.problems, recall=False, **self._source) as sweep:
            outcomes = self._outcomes(sweep, ladders, advance)
        results = self._results(ladders, dense_bytes, outcomes)
        if self.settings.measure:
            self._measure(model, results)
        written = self.target.write_results(RESULTS, results)
        self._write(written, recipe)
        return written

    @property
    def _source(self) -> dict[str, str]:
        """Which built-in text answers depend on, beside what `Target.about` says."""
        return {"text_sha256": self.problems.corpus.sha256} if isinstance(self.problems, NeedleProblems) else {}

    def _ladders(self, model: Any, recipe: Recipe) -> tuple[Ladders, float]:
        """Every family's specs that cost less than dense attention, and its bytes per token."""
        shape, common = self.target.subject.shape, self.target.settings
        itemsize = torch.finfo(self.target.subject.dtype).bits // 8
        ladders, dense = dict[str, Mapping[str, float]](), 0.0
        for family in families(recipe, self.settings.policies):
            members = {}
            for policy in rungs(family, self.budgets, common.context):
                cost = cost_of(
                    policy.plan(shape), policy.rectify, shape, context=common.context, batch=self.settings.batch,
                    kv_itemsize=itemsize, weight_bytes=parameters_read(model) * itemsize,
                )  # fmt: skip
                dense = cost.dense_total
                if cost.total < dense:
                    members[str(policy)] = cost.total
            if members:
                ladders[str(family)] = dict(sorted(members.items(), key=lambda member: -member[1]))
        if not ladders:
            raise SaccadeError(f"at a context of {common.context} no candidate reads less than dense attention")
        return ladders, dense

    def _outcomes(self, sweep: Sweep, ladders: Ladders, advance: Callable[[str], None]) -> dict[str, Outcome]:
        """Dense attention's answers and all candidates'.

        Some texts come first: a candidate that would fail even if both had all others right has failed, and those
        behind it in its family are asked no more either. A text is read once for all candidates.
        """
        possible, outcomes = {name: list(ladder) for name, ladder in ladders.items()}, dict[str, Outcome]()
        total, full = len(self.problems), self.settings.full

        def could_pass(spec: str) -> bool:
            others = numpy.ones((total - len(dense), dense.shape[1]), dtype=bool)
            table, standard = (numpy.concatenate([one, others]) for one in (_marks(outcomes[spec]), dense))
            return judge(table, standard, self.settings.quality, ALPHA / len(ladders)).passed

        for texts in sorted({total if full else min(max(total // part, FEWEST), total) for part in PARTS}):
            piece = replace(sweep, problems=Beginning(self.problems, texts))
            specs = ["dense", *chain.from_iterable(possible.values())]
            piece.run(specs, advance)
            outcomes |= {spec: piece.outcome(spec) for spec in specs}
            dense = _marks(outcomes["dense"])
            self.target.refuse_unanswered(int(dense.sum()), dense.size, "there is nothing to keep")
            if not full:
                possible = {name: list(takewhile(could_pass, ladder)) for name, ladder in possible.items()}
        return outcomes

    def _results(self, ladders: Ladders, dense_bytes: float, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
        tables = {spec: _marks(outcome) for spec, outcome in outcomes.items()}
        dense = tables.pop("dense")
        quality = self.settings.quality
        asked = {family: list(ladder) for family, ladder in ladders.items()}
        costs = {spec: cost for ladder in ladders.values() for spec, cost in ladder.items()}
        alpha = ALPHA / len(ladders)
        walked = walk(asked, tables, dense, quality)
        verdicts = {spec: judge(table, dense, quality, alpha) for spec, table in tables.items()}

        def status(spec: str) -> str:
            if verdicts[spec].passed:
                return "kept" if spec in walked else "behind a failed one"
            return "failed" if spec in walked or len(tables[spec]) == len(dense) else "behind a failed one"

        rows = [
            {"family": family, "spec": spec, "bytes": costs[spec], "correct": int(tables[spec].sum()),
             "n": int(tables[spec].size), "share_attended": outcomes[spec].share, **asdict(verdicts[spec]),
             "status": status(spec)}
            for family, members in asked.items() for spec in members
        ]  # fmt: skip
        return {
            "quality": quality,
            "full": self.settings.full,
            "alpha": ALPHA,
            "batch": self.settings.batch,
            "texts": dense.shape[0],
            "dense_correct": int(dense.sum()),
            "n": int(dense.size),
            "best_shown": best_shown(dense.shape[0], dense.shape[1], len(ladders)),
            "families": len(ladders),
            "dense_bytes": dense_bytes,
            "rows": rows,
            "chosen": cheapest(walked, costs),
        }

    def _measure(self, model: Any, results: dict[str, Any]) -> None:
        """Time what passed, and choose by that."""
        specs = ["dense", *(row["spec"] for row in results["rows"] if row["status"] == "kept")]
        before = torch.get_num_threads()
        torch.set_num_threads(self.target.settings.threads)
        try:
            times = time_per_token(model, self.target.subject.tokenizer, self.problems[0], specs)
        finally:
            torch.set_num_threads(before)
        results["ms_per_token"] = times
        fastest = min(times, key=lambda spec: times[spec])
        results["chosen"] = None if fastest == "dense" else fastest

    def _write(self, results: dict[str, Any], earlier: Recipe) -> None:
        """The recipe: what was chosen, or dense if nothing keeps the promise."""
        found = {"chosen_by": "measured time" if self.settings.measure else "bytes per token"}
        found |= {name: results[name] for name in ("quality", "batch", "families")}
        scores: dict[str, Any] = {"dense": [results["dense_correct"], results["n"]]}
        row = next((row for row in results["rows"] if row["spec"] == results["chosen"]), None)
        if row is not None:
            scores |= {row["spec"]: [row["correct"], row["n"]], "ratio_shown": round(row["shown"], 4)}
        policy = Policy.from_spec(results["chosen"] or "dense")
        self.target.write_recipe("tune", replace(earlier, policy=policy), found=found, scores=scores)


def _marks(outcome: Outcome) -> Marks:
    return numpy.array(outcome.right, dtype=bool)


def _texts(target: Target, quality: float, families: int) -> tuple[Target, Problems]:
    """What is asked, every text one of its own, and the target with the context or number of questions that it gives.

    Raises a SaccadeError with the number needed if there are too few texts to show the quality.
    """
    problems, settings = target.problems(TUNING), target.settings
    if isinstance(problems, FileProblems):
        # Budgets and bytes follow from how long the texts are.
        problems.refuse_uneven()
        asked = len(problems[0].asks)
        settings = replace(settings, context=problems.median_length, questions=len(problems) * asked)
    else:
        asked = min(ASKED, needles_in(settings.task, settings.context))
    needed, remedy = texts_needed(quality, asked, families), "a lower --quality or fewer --policy"
    if isinstance(problems, NeedleProblems):
        wanted = len(problems) or texts_needed(quality, asked, families, margin=MARGIN)
        settings = replace(settings, questions=settings.questions or wanted * asked)
        problems = replace(problems, count=wanted, once=True)
        more = f"--questions {needed * asked}" if len(problems) == wanted else "--task FILE.jsonl, a shorter --context"
        remedy = f"{more}, {remedy}"
    if len(problems) < needed:
        raise SaccadeError(
            f"{len(problems)} texts of {asked} questions cannot show a quality of {quality:g}, but "
            f"{best_shown(len(problems), asked, families):.4f} at best, for any of {families} families of policies: at "
            f"least {needed} texts can, if all answers are right ({remedy})"
        )
    return replace(target, settings=settings), problems
