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
from ..eval.output import write_json
from ..methods.policy import Policy
from ..plans.cost import cost_of
from ..recipes.recipe import Recipe
from ..recipes.resolve import beside
from .candidates import families, ladder, rungs
from .layers import LayerSearch
from .layers import Settings as LayerSettings
from .ledger import Ledger
from .problems import Problems
from .promise import ALPHA, Answers, Verdict, cheapest, effect_for, family_effect, judge, questions_needed, walk
from .sweep import KEY, Sweep
from .target import TUNING, Common, Target
from .task_file import FileProblems
from .timing import time_per_token

LEDGER, RESULTS, SEARCH = "answers.jsonl", "tune.json", "layers"
SEARCHED_QUESTIONS = 96


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user can choose; see `saccade tune --help`."""

    common: Common
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
        problems: what candidates are judged by.
        known: what is known of the model before any weight is read.
        search: for re-selection layers, if none are known and none were named.
    """

    settings: Settings
    target: Target
    budgets: tuple[int, ...]
    problems: Problems
    known: Recipe | None
    search: LayerSearch | None

    @classmethod
    def check(cls, settings: Settings) -> Tuning:
        """Resolve settings.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        if not 0 < settings.quality < 1:
            raise SaccadeError(f"--quality {settings.quality:g} is not valid: above 0 and below 1, such as 0.99")
        if settings.measure and settings.batch > 1:
            raise SaccadeError(f"--batch {settings.batch} does not fit --measure, which times single rows")
        target = Target.check(settings.common)
        problems = target.problems(seed=TUNING)
        if isinstance(problems, FileProblems):
            # Budgets and bytes follow from how long the texts are.
            target = replace(target, settings=replace(settings.common, context=problems.median_length))
            problems.refuse_uneven()
        common = target.settings
        budgets = ladder(common.context) if settings.budgets is None else parse_budgets(settings.budgets)
        known = Recipe.read(target.recipe_path) if target.recipe_path.exists() else None
        if known is None:
            known = beside(target.source.location, target.source.decoder)
        search = None
        # A file has one set of texts: what chose a layer must not judge it.
        if not settings.policies and (known is None or known.reselect is None) and not target.from_file:
            folder = common.output_dir / SEARCH
            questions = min(SEARCHED_QUESTIONS, common.questions)
            other = replace(common, output_dir=folder, recipe=None, questions=questions)
            search = LayerSearch.check(LayerSettings(other, "tidal", ",".join(map(str, budgets)), 1))
        tuning = cls(settings, target, tuple(sorted(budgets, reverse=True)), problems, known, search)
        tuning._refuse_hopeless(len(families(known, settings.policies)) + 3 * (search is not None))
        for family in families(known, settings.policies):
            for policy in rungs(family, tuning.budgets, common.context):
                policy.plan(target.shape)
        return tuning

    def _refuse_hopeless(self, count: int) -> None:
        asked = sum(len(self.problems[number].asks) for number in range(len(self.problems)))
        needed = questions_needed(self.settings.quality, count)
        if asked < needed:
            raise SaccadeError(
                f"{asked} questions cannot show a quality of {self.settings.quality:g} for any of {count} families of "
                f"policies: at least {needed} can, if all answers are right (--questions, or fewer --policy)"
            )

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, at most."""
        count = len(families(self.known, self.settings.policies)) + 3 * (self.search is not None)
        return len(self.problems) * (1 + count * len(self.budgets)) + (self.search.units if self.search else 0)

    def run(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Try, judge, choose; write results and the recipe."""
        if self.search is not None:
            self.search.run(advance)
        model = self.target.load()
        recipe = self.target.earlier(model)
        if self.search is not None:
            recipe = _joined(recipe, Recipe.read(self.search.target.recipe_path))
        ladders, dense_bytes = self._ladders(model, recipe)
        costs = {"dense": dense_bytes, **dict(row for ladder in ladders.values() for row in ladder)}
        folder = self.target.settings.output_dir
        with Ledger(folder / LEDGER, {**self.target.about(), "texts": len(self.problems)}, KEY) as ledger:
            sweep = Sweep(
                model, self.target.tokenizer, self.problems, ledger, self.target.settings.threads, recall=False
            )
            members = {name: [spec for spec, _ in ladder] for name, ladder in ladders.items()}
            tables, dense = self._tables(sweep, members, advance)
            verdicts = self._verdicts(members, tables, dense)
            shares = {spec: sweep.outcome(spec).share for spec in tables}
        results = self._results(ladders, tables, dense, verdicts, shares, costs, cheapest(verdicts, costs))
        if self.settings.measure:
            self._measure(model, results, verdicts)
        write_json(folder / RESULTS, results)
        self._write(results, shape_of_model(model), recipe)
        return results

    def _ladders(self, model: Any, recipe: Recipe | None) -> tuple[dict[str, list[tuple[str, float]]], float]:
        """Specs and bytes per token of every family, most expensive first, and dense attention's bytes.

        What costs as much as dense attention is left out.
        """
        shape, common = self.target.shape, self.target.settings
        itemsize = torch.finfo(self.target.dtype).bits // 8
        ladders: dict[str, list[tuple[str, float]]] = {}
        dense = 0.0
        for family in families(recipe, self.settings.policies):
            rows = []
            for policy in rungs(family, self.budgets, common.context):
                cost = cost_of(
                    policy.plan(shape),
                    policy.rectify,
                    shape,
                    context=common.context,
                    batch=self.settings.batch,
                    kv_itemsize=itemsize,
                    weight_bytes=parameters_read(model) * itemsize,
                )
                dense = cost.dense_total
                if cost.total < dense:
                    rows.append((policy.to_spec(), cost.total))
            if rows:
                ladders[family.to_spec()] = sorted(rows, key=lambda row: -row[1])
        if not ladders:
            raise SaccadeError(f"at a context of {common.context} no candidate reads less than dense attention")
        return ladders, dense

    def _tables(
        self, sweep: Sweep, members: Mapping[str, Sequence[str]], advance: Callable[[str], None]
    ) -> tuple[dict[str, Answers], Answers]:
        """Answers by spec, and dense attention's; a family's smaller budgets are asked only while larger ones pass."""
        tables: dict[str, Answers] = {}
        everything = [spec for ladder in members.values() for spec in ladder]
        sweep.run(["dense", *(everything if self.settings.full else ())], advance)
        dense = _table(sweep, "dense")
        if not dense.any():
            raise SaccadeError(
                f"dense attention answers none of {dense.size} questions of task {self.target.settings.task}, so there "
                "is nothing to keep; choose another --task"
            )
        if self.settings.full:
            return {spec: _table(sweep, spec) for spec in everything}, dense
        going = dict(members)
        for rung in range(max(map(len, members.values()))):
            specs = [ladder[rung] for ladder in going.values() if rung < len(ladder)]
            sweep.run(specs, advance)
            tables |= {spec: _table(sweep, spec) for spec in specs}
            # Without the design effect, which only grows: whatever fails here fails for good.
            passing = {s for s in specs if judge(tables[s], dense, self.settings.quality, ALPHA / len(members)).passed}
            going = {name: ladder for name, ladder in going.items() if rung < len(ladder) and ladder[rung] in passing}
            if not going:
                break
        return tables, dense

    def _verdicts(
        self, members: Mapping[str, Sequence[str]], tables: Mapping[str, Answers], dense: Answers
    ) -> dict[str, Verdict]:
        asked = {name: [spec for spec in ladder if spec in tables] for name, ladder in members.items()}
        return walk(asked, tables, dense, self.settings.quality)

    def _results(
        self,
        ladders: Mapping[str, Sequence[tuple[str, float]]],
        tables: Mapping[str, Answers],
        dense: Answers,
        verdicts: Mapping[str, Verdict],
        shares: Mapping[str, float],
        costs: Mapping[str, float],
        chosen: str | None,
    ) -> dict[str, Any]:
        quality = self.settings.quality
        effect = family_effect({family: [members[0][0]] for family, members in ladders.items()}, tables, dense, quality)
        rows = []
        for family, members in ladders.items():
            for spec, _ in members:
                if spec not in tables:
                    continue
                own = effect_for(tables[spec], dense, quality, effect)
                verdict = judge(tables[spec], dense, quality, ALPHA / len(ladders), own)
                status = "failed" if not verdict.passed else "kept" if spec in verdicts else "behind a failed one"
                rows.append(
                    {"family": family, "spec": spec, "bytes": costs[spec], "correct": int(tables[spec].sum()),
                     "n": int(tables[spec].size), "share_attended": shares[spec], **asdict(verdict), "status": status}
                )  # fmt: skip
        return {
            **self.target.about(),
            "quality": quality,
            "full": self.settings.full,
            "alpha": ALPHA,
            "batch": self.settings.batch,
            "texts": dense.shape[0],
            "dense_correct": int(dense.sum()),
            "n": int(dense.size),
            "design_effect": effect,
            "families": len(ladders),
            "dense_bytes": costs["dense"],
            "rows": rows,
            "chosen": chosen,
            "environment": self.target.environment(),
        }

    def _measure(self, model: Any, results: dict[str, Any], verdicts: Mapping[str, Verdict]) -> None:
        """Time what passed, and choose by that."""
        specs = ["dense", *(spec for spec, verdict in verdicts.items() if verdict.passed)]
        before = torch.get_num_threads()
        torch.set_num_threads(self.target.settings.threads)
        try:
            times = time_per_token(model, self.target.tokenizer, self.problems[0], specs)
        finally:
            torch.set_num_threads(before)
        results["ms_per_token"] = times
        faster = {spec: value for spec, value in times.items() if spec != "dense" and value < times["dense"]}
        results["chosen"] = min(faster, key=lambda spec: faster[spec]) if faster else None

    def _write(self, results: dict[str, Any], shape: Any, earlier: Recipe | None) -> None:
        """The recipe: what was chosen, or dense if nothing keeps the promise."""
        found = {
            "chosen_by": "measured time" if self.settings.measure else "bytes per token",
            **{name: results[name] for name in ("quality", "batch", "families")},
        }
        scores: dict[str, Any] = {"dense": [results["dense_correct"], results["n"]]}
        row = next((row for row in results["rows"] if row["spec"] == results["chosen"]), None)
        if row is not None:
            scores |= {row["spec"]: [row["correct"], row["n"]], "share_shown": round(row["shown"], 4)}
        policy = Policy.from_spec(results["chosen"] or "dense")
        self.target.write_recipe("tune", policy, shape, earlier, found=found, scores=scores)


def read_tables(folder: Path) -> tuple[dict[str, list[str]], dict[str, Answers], Answers, dict[str, float], float]:
    """What a finished `--full` run has left: families, answers by spec, dense attention's, bytes by spec, the quality.

    Raises:
        OutputError: a folder without such results.
    """
    try:
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (folder / LEDGER).read_text(encoding="utf-8").splitlines()[1:]]
    except (OSError, ValueError) as error:
        raise OutputError(f"{str(folder)!r} holds no finished run of saccade tune: {error}") from error
    answers: dict[str, dict[int, list[int]]] = {}
    for line in lines:
        answers.setdefault(line["spec"], {})[line["problem"]] = line["right"]
    members: dict[str, list[str]] = {}
    for row in results["rows"]:
        members.setdefault(row["family"], []).append(row["spec"])
    if not results["full"]:
        raise OutputError(f"{str(folder)!r} holds a run that left out what had no chance; run saccade tune --full")
    tables = {
        spec: numpy.array([answers[spec][number] for number in range(results["texts"])], dtype=bool)
        for spec in ("dense", *(spec for ladder in members.values() for spec in ladder))
    }
    costs = {row["spec"]: row["bytes"] for row in results["rows"]}
    return members, tables, tables.pop("dense"), costs, results["quality"]


def _joined(earlier: Recipe | None, searched: Recipe) -> Recipe:
    """What is known, with the layers that a search has just found."""
    if earlier is None:
        return searched
    found, scores = {**earlier.found, **searched.found}, {**earlier.scores, **searched.scores}
    return replace(earlier, reselect=searched.reselect, found=found, scores=scores)


def _table(sweep: Sweep, spec: str) -> Answers:
    return numpy.array(sweep.outcome(spec).right, dtype=bool)
