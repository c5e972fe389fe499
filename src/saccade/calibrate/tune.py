"""`saccade tune`: the cheapest policy that keeps a share of dense attention's answers, with 95% confidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from ..checkpoints.shape import parameters_read, shape_of_model
from ..errors import OutputError, SaccadeError
from ..eval.entry import parse_budgets
from ..eval.output import read_lines
from ..methods.policy import Policy
from ..plans.cost import cost_of
from ..recipes.recipe import Recipe
from .candidates import families, ladder, rungs
from .layers import LayerSearch, LayerSettings
from .problems import Problems
from .promise import ALPHA, Marks, Standard, Tables, cheapest, judge, questions_needed, walk
from .sweep import Sweep
from .target import LEDGER, TUNING, Target, TargetSettings
from .task_file import FileProblems
from .timing import time_per_token

Ladders = Mapping[str, Mapping[str, float]]
"""Bytes per token of every family's specs, most expensive first."""

RESULTS, SEARCH = "tune.json", "layers"
SEARCHED_QUESTIONS = 96


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What the user can choose; see `saccade tune --help`."""

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
        known: what is known of the model before any weight is read.
        search: for re-selection layers, if none are known and none were named.
    """

    settings: TuneSettings
    target: Target
    budgets: tuple[int, ...]
    problems: Problems
    known: Recipe
    search: LayerSearch | None

    @classmethod
    def check(cls, settings: TuneSettings) -> Tuning:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        quality = settings.quality
        if not 0 < quality < 1:
            raise SaccadeError(f"--quality {quality:g} is not valid: above 0 and below 1, such as 0.99")
        if settings.measure and settings.batch > 1:
            raise SaccadeError(f"--batch {settings.batch} does not fit --measure, which times single rows")
        target = Target.check(settings.common)
        problems = target.problems(TUNING)
        if isinstance(problems, FileProblems):
            # Budgets and bytes follow from how long the texts are.
            target = replace(target, settings=replace(settings.common, context=problems.median_length))
            problems.refuse_uneven()
        common = target.settings
        budgets = ladder(common.context) if settings.budgets is None else parse_budgets(settings.budgets)
        known = target.earlier(target.subject.shape)
        search = None
        # A file has one set of texts: what chose a layer must not judge it.
        if not settings.policies and known.reselect is None and not target.from_file:
            folder = common.output_dir / SEARCH
            questions = min(SEARCHED_QUESTIONS, common.questions)
            other = replace(common, output_dir=folder, recipe=None, questions=questions)
            search = LayerSearch.check(LayerSettings(other, "tidal", ",".join(map(str, budgets)), 1))
        tuning = cls(settings, target, tuple(sorted(budgets, reverse=True)), problems, known, search)
        asked = sum(len(problems[number].asks) for number in range(len(problems)))
        needed = questions_needed(quality, tuning.most_families)
        if asked < needed:
            raise SaccadeError(
                f"{asked} questions cannot show a quality of {quality:g} for any of {tuning.most_families} families of "
                f"policies: at least {needed} can, if all answers are right (--questions, or fewer --policy)"
            )
        for family in families(known, settings.policies):
            for policy in rungs(family, tuning.budgets, common.context):
                policy.plan(target.subject.shape)
        return tuning

    @property
    def most_families(self) -> int:
        """How many families there will be, at most: a layer that is searched gives three more."""
        return len(families(self.known, self.settings.policies)) + 3 * (self.search is not None)

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
        with self.target.sweep(model, self.problems, recall=False) as sweep:
            tables, dense = self._tables(sweep, ladders, advance)
            shares = {spec: sweep.outcome(spec).share for spec in tables}
        results = self._results(ladders, dense_bytes, tables, dense, shares)
        if self.settings.measure:
            self._measure(model, results)
        written = self.target.write_results(RESULTS, results)
        self._write(written, recipe)
        return written

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

    def _tables(self, sweep: Sweep, ladders: Ladders, advance: Callable[[str], None]) -> tuple[dict[str, Marks], Marks]:
        """Answers by spec, and dense attention's; a family's smaller budgets are asked only while larger ones pass."""

        def ask(specs: Sequence[str]) -> dict[str, Marks]:
            sweep.run(specs, advance)
            return {spec: sweep.marks(spec, len(self.problems)) for spec in specs}

        def lost(table: Marks, dense: Marks) -> bool:
            # Even if it loses nothing on other texts. Without the design effect, which only grows.
            others = numpy.ones((len(self.problems) - len(dense), dense.shape[1]), dtype=bool)
            whole, dense = numpy.vstack([table, others]), numpy.vstack([dense, others])
            return not judge(whole, dense, self.settings.quality, ALPHA / len(ladders)).passed

        everything = [spec for family in ladders.values() for spec in family] if self.settings.full else []
        if not everything:
            # What the walk below wants; were it to want more, texts would be prefilled again.
            sweep.run_down(ladders.values(), lost, advance)
        tables = ask(["dense", *everything])
        dense = tables.pop("dense")
        self.target.refuse_unanswered(int(dense.sum()), dense.size, "there is nothing to keep")
        for family in ladders.values():
            for spec in family:
                tables |= ask([spec])
                if lost(tables[spec], dense):
                    break
        return tables, dense

    def _results(
        self, ladders: Ladders, dense_bytes: float, tables: Tables, dense: Marks, shares: Mapping[str, float]
    ) -> dict[str, Any]:
        quality = self.settings.quality
        asked = {family: [spec for spec in ladder if spec in tables] for family, ladder in ladders.items()}
        costs = {spec: cost for ladder in ladders.values() for spec, cost in ladder.items()}
        standard, walked = Standard.of(asked, tables, dense, quality), walk(asked, tables, dense, quality)
        verdicts = {spec: standard.verdict(table) for spec, table in tables.items()}
        rows = [
            {"family": family, "spec": spec, "bytes": costs[spec], "correct": int(tables[spec].sum()),
             "n": int(tables[spec].size), "share_attended": shares[spec], **asdict(verdicts[spec]),
             "status": "failed" if not verdicts[spec].passed else "kept" if spec in walked else "behind a failed one"}
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
            "design_effect": standard.effect,
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
            scores |= {row["spec"]: [row["correct"], row["n"]], "share_shown": round(row["shown"], 4)}
        policy = Policy.from_spec(results["chosen"] or "dense")
        self.target.write_recipe("tune", replace(earlier, policy=policy), found=found, scores=scores)


def read_tables(
    folder: Path,
) -> tuple[dict[str, list[str]], dict[str, Marks], Marks, dict[str, float], float]:
    """What a finished `--full` run has left: families, answers by spec, dense attention's, bytes by spec, the quality.

    Raises an OutputError for a folder without such results.
    """
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        lines = read_lines(folder / LEDGER)[1:]
    except (OSError, ValueError) as error:
        raise OutputError(f"{str(folder)!r} holds no finished run of saccade tune: {error}") from error
    if not results["full"]:
        raise OutputError(f"{str(folder)!r} holds a run that left out what had no chance; run saccade tune --full")
    answers = {(line["spec"], line["problem"]): line["right"] for line in lines}
    members: dict[str, list[str]] = {}
    for row in results["rows"]:
        members.setdefault(row["family"], []).append(row["spec"])
    costs = {row["spec"]: row["bytes"] for row in results["rows"]}
    tables = {
        spec: numpy.array([answers[spec, number] for number in range(results["texts"])], dtype=bool)
        for spec in ("dense", *costs)
    }
    return members, tables, tables.pop("dense"), costs, results["quality"]
