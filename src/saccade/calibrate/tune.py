"""`saccade tune`: the cheapest policy whose accuracy is at least a share of dense attention's, with 95% confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, takewhile
from typing import Any

import numpy
import torch

from ..adapters.hf.probe import TIMES, Passage
from ..adapters.hf.support import refuse_rewinding
from ..checkpoints.shape import shape_of_model
from ..checkpoints.traffic import state_bytes, weights_read
from ..errors import SaccadeError
from ..eval.entry import parse_budgets
from ..methods.policy import Policy
from ..plans.cost import cost_of
from ..recipes.recipe import Recipe
from .candidates import families, ladder, rungs
from .layers import LayerSearch, LayerSettings
from .problems import NeedleProblems, Problems, needles_in
from .promise import (
    ALPHA,
    FEWEST,
    FINALISTS,
    MARGIN,
    RUNGS,
    Families,
    Marks,
    best_shown,
    cheapest,
    finalists,
    judge,
    ratio_to_screen,
    screen,
    texts_needed,
    texts_to_screen,
    walk,
)
from .standing import Standing
from .sweep import Outcome, Sweep
from .target import ASKED, TUNING, Target, TargetSettings
from .task_file import FileProblems
from .timing import time_per_token

Ladders = Mapping[str, Mapping[str, float]]
"""Bytes per token of every family's specs, most expensive first."""

RESULTS, SEARCH, MOST_SEARCHED = "tune.json", "layers", 96
PARTS = 16, 4, 1
"""After which parts of the texts candidates are left out that can no longer pass."""


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


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of asking; outcomes by spec, dense attention's among them.

    Attributes:
        first: about the texts that screen; none without a screen.
        through: whom the screen let through.
        going: whom the others judge; none where nothing came through.
        judging: about those.
    """

    first: Mapping[str, Outcome]
    through: Families
    going: Families
    judging: Mapping[str, Outcome]


@dataclass(frozen=True)
class Tuning:
    """A checked tuning; `run` it.

    Attributes:
        budgets: largest first.
        problems: every one of another text.
        screening: numbers of those that screen all families, the others judge; none: all judge all families.
        known: what is known of the model before any weight is read.
        search: for re-selection layers, if none are known and none were named.
        most_families: how many there will be, at most: a layer that is searched gives three more.
        standing: of the candidates, while it runs.
    """

    settings: TuneSettings
    target: Target
    budgets: tuple[int, ...]
    problems: Problems
    screening: tuple[int, ...]
    known: Recipe
    search: LayerSearch | None
    most_families: int
    standing: Standing = field(default_factory=Standing)

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
        searches = not settings.policies and known.reselect is None and settings.common.context >= Passage(()).shortest
        most = len(families(known, settings.policies)) + 3 * searches
        named = () if settings.budgets is None else parse_budgets(settings.budgets)
        target, problems, screening = _texts(target, quality, most, full=settings.full)
        common = target.settings
        budgets = named or ladder(common.context)
        search = None
        if searches:
            # A file has one set of texts: what chose a layer must not judge it.
            task, asked = "" if target.from_file else common.task, min(MOST_SEARCHED, common.questions)
            other = replace(common, output_dir=common.output_dir / SEARCH, recipe=None, task=task, questions=asked)
            fitting = [budget for budget in budgets if TIMES * budget <= common.context] or [common.context // TIMES]
            search = LayerSearch.check(LayerSettings(other, "tidal", ",".join(map(str, fitting)), 1))
        tuning = cls(settings, target, tuple(sorted(budgets, reverse=True)), problems, screening, known, search, most)
        for family in families(known, settings.policies):
            for policy in rungs(family, tuning.budgets, common.context):
                policy.plan(target.subject.shape)
                refuse_rewinding(policy, target.subject.shape)
        return tuning

    @property
    def design(self) -> str:
        """What will be asked, and what that can show at best, in one line."""
        asked, most, judging = len(self.problems[0].asks), self.most_families, len(self.judging)
        begin, judged, why = f"asking {judging:,} texts", most, ""
        if self.screening:
            begin = f"screening on {len(self.screening):,} texts, judging on {judging:,} others,"
            judged, why = FINALISTS, f", of which at most {FINALISTS} are judged"
        elif most > FINALISTS and not self.settings.full:
            why = ", too few texts to screen them first"
        return (
            f"{begin} {asked} questions each; that shows a ratio of accuracies of "
            f"{best_shown(judging, asked, judged):.4f} at best, if a candidate loses no answer (families: {most}{why})"
        )

    @property
    def judging(self) -> list[int]:
        """Numbers of the texts that judge."""
        return sorted({*range(len(self.problems))} - {*self.screening})

    @property
    def screen_wants(self) -> float:
        """The least ratio of accuracies that the screen lets through."""
        return ratio_to_screen(self.settings.quality, len(self.judging), len(self.problems[0].asks))

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, at most."""
        every = self.most_families * len(self.budgets)
        judged = FINALISTS * min(RUNGS, len(self.budgets)) if self.screening else every
        asked = len(self.screening) * (1 + every) + len(self.judging) * (1 + judged)
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
            self.standing.families, self.standing.records = ladders, sweep.ledger.records
            results = self._results(ladders, dense_bytes, self._asked(sweep, ladders, advance))
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
        weight_bytes = weights_read(model, self.settings.batch) * itemsize
        states = state_bytes(model.config, self.target.subject.dtype)
        ladders, dense = dict[str, Mapping[str, float]](), 0.0
        for family in families(recipe, self.settings.policies):
            members = {}
            for policy in rungs(family, self.budgets, common.context):
                cost = cost_of(
                    policy.plan(shape), policy.rectify, shape, context=common.context, batch=self.settings.batch,
                    kv_itemsize=itemsize, weight_bytes=weight_bytes, state_bytes=states,
                )  # fmt: skip
                dense = cost.dense_total
                if cost.total < dense:
                    members[str(policy)] = cost.total
            if members:
                ladders[str(family)] = dict(sorted(members.items(), key=lambda member: -member[1]))
        if not ladders:
            raise SaccadeError(f"at a context of {common.context} no candidate reads less than dense attention")
        return ladders, dense

    def _asked(self, sweep: Sweep, ladders: Ladders, advance: Callable[[str], None]) -> Asked:
        going: Families = {name: list(ladder) for name, ladder in ladders.items()}
        through, first = going, dict[str, Outcome]()
        if self.screening:
            first = self._answers(sweep, self.screening, going, advance)
            tables = {spec: _marks(outcome) for spec, outcome in first.items()}
            through = screen(going, tables, tables["dense"], self.screen_wants)
            going = finalists(through, _costs(ladders))
        return Asked(first, through, going, self._outcomes(sweep, going, advance) if going else {})

    def _answers(
        self, sweep: Sweep, texts: Sequence[int], families: Families, advance: Callable[[str], None]
    ) -> dict[str, Outcome]:
        """Dense attention's answers about some texts and all candidates'. A text is read once for all of them."""
        part, specs = replace(sweep, part=texts), ["dense", *chain.from_iterable(families.values())]
        part.run(specs, advance)
        outcomes = {spec: part.outcome(spec) for spec in specs}
        dense = outcomes["dense"]
        self.target.refuse_unanswered(dense.correct, dense.count, "there is nothing to keep")
        return outcomes

    def _outcomes(self, sweep: Sweep, families: Families, advance: Callable[[str], None]) -> dict[str, Outcome]:
        """Dense attention's answers and all candidates' about the texts that judge.

        Some texts come first: a candidate that would fail even if both had all others right has failed, and those
        behind it in its family are asked no more either.
        """
        possible, outcomes = dict(families), dict[str, Outcome]()
        judging, total, full = self.judging, len(self.judging), self.settings.full

        def could_pass(spec: str) -> bool:
            others = numpy.ones((total - len(dense), dense.shape[1]), dtype=bool)
            table, standard = (numpy.concatenate([one, others]) for one in (_marks(outcomes[spec]), dense))
            return judge(table, standard, self.settings.quality, ALPHA / len(families)).passed

        for texts in sorted({total if full else min(max(total // part, FEWEST), total) for part in PARTS}):
            outcomes |= self._answers(sweep, judging[:texts], possible, advance)
            dense = _marks(outcomes["dense"])
            if not full:
                possible = {name: list(takewhile(could_pass, ladder)) for name, ladder in possible.items()}
        return outcomes

    def _results(self, ladders: Ladders, dense_bytes: float, asked: Asked) -> dict[str, Any]:
        """What stands in `tune.json`; totals are of the texts that judged, or of those that let nothing through."""
        outcomes, quality = {**asked.first, **asked.judging}, self.settings.quality
        tables = {spec: _marks(outcome) for spec, outcome in outcomes.items()}
        dense, screens = tables.pop("dense"), {spec: _marks(outcome) for spec, outcome in asked.first.items()}
        costs, count = _costs(ladders), len(asked.going)
        walked = walk(asked.going, tables, dense, quality)

        def row(family: str, spec: str) -> dict[str, Any]:
            outcome, judged = outcomes[spec], spec in asked.judging
            told = asdict(judge(tables[spec], dense if judged else screens["dense"], quality, ALPHA / max(count, 1)))
            if not judged:
                told |= {"shown": None, "passed": False}
                status = "not judged" if spec in asked.through[family] else "screened out"
            elif told["passed"]:
                status = "kept" if spec in walked else "behind a failed one"
            else:
                last = spec in walked or outcome.count == dense.size
                status = "failed" if last else "behind a failed one"
            screened = float(screens[spec].sum() / screens["dense"].sum()) if screens else None
            return {
                "family": family, "spec": spec, "bytes": costs[spec], "correct": outcome.correct, "n": outcome.count,
                "share_attended": outcome.share, **told, "screened": screened, "status": status,
            }  # fmt: skip

        about = {"texts": list(self.screening), "families": len(ladders), "wanted": self.screen_wants}
        return {
            "quality": quality,
            "full": self.settings.full,
            "alpha": ALPHA,
            "batch": self.settings.batch,
            "texts": dense.shape[0],
            "dense_correct": int(dense.sum()),
            "n": int(dense.size),
            "best_shown": best_shown(dense.shape[0], dense.shape[1], count) if count else None,
            "families": count,
            "screened": about if screens else None,
            "dense_bytes": dense_bytes,
            "rows": [row(family, spec) for family, ladder in ladders.items() for spec in ladder],
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
        found |= {name: results[name] for name in ("quality", "batch", "families", "screened")}
        scores: dict[str, Any] = {"dense": [results["dense_correct"], results["n"]]}
        row = next((row for row in results["rows"] if row["spec"] == results["chosen"]), None)
        if row is not None:
            scores |= {row["spec"]: [row["correct"], row["n"]], "ratio_shown": round(row["shown"], 4)}
        policy = Policy.from_spec(results["chosen"] or "dense")
        self.target.write_recipe("tune", replace(earlier, policy=policy), found=found, scores=scores)


def _costs(ladders: Ladders) -> dict[str, float]:
    return {spec: cost for ladder in ladders.values() for spec, cost in ladder.items()}


def _marks(outcome: Outcome) -> Marks:
    return numpy.array(outcome.right, dtype=bool)


def _texts(target: Target, quality: float, families: int, *, full: bool) -> tuple[Target, Problems, tuple[int, ...]]:
    """What is asked, every text one of its own; the target with the context or number of questions that it gives; and
    which texts screen, drawn by the seed: none where there are few families, or too few texts to judge on the others.

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
    screening = 0 if full or families <= FINALISTS else texts_to_screen(quality, asked)
    needed, remedy = texts_needed(quality, asked, families), "a lower --quality or fewer --policy"
    least = screening + texts_needed(quality, asked, FINALISTS) if screening else needed
    if isinstance(problems, NeedleProblems):
        judged = FINALISTS if screening else families
        wanted = len(problems) or screening + texts_needed(quality, asked, judged, margin=MARGIN)
        settings = replace(settings, questions=settings.questions or wanted * asked)
        problems = replace(problems, count=wanted, once=True)
        more = f"--questions {min(needed, least) * asked}"
        remedy = f"{more if len(problems) == wanted else '--task FILE.jsonl, a shorter --context'}, {remedy}"
    if len(problems) < min(needed, least):
        raise SaccadeError(
            f"{len(problems)} texts of {asked} questions cannot show a quality of {quality:g}, but "
            f"{best_shown(len(problems), asked, families):.4f} at best, for any of {families} families of policies: at "
            f"least {min(needed, least)} texts can, if all answers are right ({remedy})"
        )
    drawn = numpy.random.default_rng(settings.seed).permutation(len(problems))[: screening * (len(problems) >= least)]
    return replace(target, settings=settings), problems, tuple(sorted(drawn.tolist()))
