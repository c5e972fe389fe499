"""`saccade tune`: the cheapest policy that keeps a share of what dense attention says, with 95% confidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy
import torch

from ..adapters.hf.probe import TIMES, TOLD, Passage, clean
from ..adapters.hf.support import refuse_rewinding
from ..checkpoints.shape import shape_of_model
from ..checkpoints.traffic import state_bytes, weights_read
from ..errors import SaccadeError
from ..eval.benchmark import SUFFIXES
from ..eval.entry import parse_budgets, terms_of
from ..eval.interval import wilson
from ..eval.workers import on_threads, workers_for
from ..methods.policy import Policy
from ..plans.cost import cost_of
from ..recipes.acceptance import Acceptance
from ..recipes.recipe import Recipe
from . import promise
from .candidates import SHARES, SMALLEST, families, rungs, served
from .judged import DENSE, Answers, Judged, KeyTokens
from .layers import PROBED, LayerSearch, LayerSettings
from .ledger import held
from .passages import Texts
from .promise import ALPHA, FEWEST, JUDGED, MARGIN, SEARCHING, Tally
from .sweep import Sweep
from .target import Target, TargetSettings
from .task_file import FileProblems

Ladders = Mapping[str, Mapping[str, float]]
"""Bytes per token of every family's specs, most expensive first."""

RESULTS, SEARCH, LONGEST = "tune.json", "layers", 4096
AGREEMENT, PART = 0.95, 6
"""What is promised of key tokens where nobody says; and the part of all texts that chooses who is judged, at most."""


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What the user can choose; see `saccade tune --help`. A `context` of 0: `LONGEST`, or what the model has."""

    common: TargetSettings
    policies: tuple[str, ...] = ()
    budgets: str | None = None
    batch: int = 1
    texts: Path | None = None
    agreement: float | None = None
    quality: float | None = None
    minutes: float | None = None
    acceptance: tuple[Path, ...] = ()

    def wanted(self) -> float:
        """The ratio that is promised, or a SaccadeError about what does not go together."""
        task = self.common.task
        if task and not task.endswith(SUFFIXES):
            raise SaccadeError(f"--task {task!r} is not valid: a file of questions, FILE{' or FILE'.join(SUFFIXES)}")
        for name, given, other in (
            ("--agreement", self.agreement if task else None, "without --task: questions have a --quality"),
            ("--texts", self.texts if task else None, "without --task: a file of questions has its own"),
            ("--acceptance", next(iter(self.acceptance), None) if task else None, "without --task: it is of tokens"),
            ("--quality", None if task else self.quality, "with --task FILE.jsonl: texts have an --agreement"),
        ):
            if given is not None:
                raise SaccadeError(f"{name} {given} is valid only {other}")
        value = self.quality if task else AGREEMENT if self.agreement is None else self.agreement
        if value is None:
            raise SaccadeError(f"--task {task!r} needs a --quality: above 0 and below 1, such as 0.99")
        if not 0 < value < 1:
            name = "quality" if task else "agreement"
            raise SaccadeError(f"--{name} {value:g} is not valid: above 0 and below 1, such as 0.95")
        if self.minutes is not None and not self.minutes > 0:
            raise SaccadeError(f"--minutes {self.minutes:g} is not valid: above 0")
        return value


@dataclass(frozen=True)
class Tuning:
    """A checked tuning; `run` it, best once it is `timed`.

    Attributes:
        budgets: largest first.
        order: numbers of the judge's texts, drawn by the seed.
        total: how many of them are used.
        search: for re-selection layers, if none are known and none were named.
        most: how many families there will be, at most: a layer that is searched gives more.
        model: the loaded one.
        minutes: what a run is thought to take.
        begun: how many texts a layer was searched on by a run that this one goes on with; None: it begins.
        told: what drafts of served policies say of these.
    """

    settings: TuneSettings
    wanted: float
    target: Target
    budgets: tuple[int, ...]
    judged: Judged
    order: tuple[int, ...]
    total: int
    search: LayerSearch | None
    most: int
    model: Any = None
    minutes: float | None = None
    begun: int | None = None
    told: tuple[Acceptance, ...] = ()

    @classmethod
    def check(cls, settings: TuneSettings) -> Tuning:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        wanted, common, told = settings.wanted(), settings.common, tuple(map(Acceptance.read, settings.acceptance))
        target = Target.check(common)
        subject, positions = target.subject, target.subject.positions
        problems = FileProblems(subject.tokenizer, Path(common.task), positions=positions) if common.task else None
        if problems:
            problems.refuse_uneven()
        lengths = [len(problems[number].tokens) for number in range(len(problems))] if problems else []
        context = int(median(lengths)) if lengths else common.context or min(LONGEST, positions)
        common = replace(common, context=context, questions=len(problems) * len(problems[0].asks) if problems else 0)
        target = replace(target, settings=common)
        subject.refuse_too_large(common.context)
        usual = {max(context // share, SMALLEST) for share in SHARES}
        budgets = tuple(sorted(usual if settings.budgets is None else parse_budgets(settings.budgets), reverse=True))
        known = target.earlier(subject.shape)
        tried = _families(known, settings)
        for policy in chain.from_iterable(rungs(family, budgets, context) for family in tried):
            policy.plan(subject.shape)
            refuse_rewinding(policy, subject.shape)
        judged: Judged
        if problems:
            judged = Answers(target, problems)
            wants = len(judged)
        else:
            texts = Texts.of(settings.texts, context, budgets, positions)
            wants = SEARCHING + promise.texts_needed(wanted, TOLD, margin=MARGIN)
            judged = KeyTokens(target, texts, tuple(texts.passages(subject.tokenizer, wants)))
        order = tuple(numpy.random.default_rng(common.seed).permutation(len(judged)).tolist())
        search = None
        if not settings.policies and known.layers_of("tidal") is None and context >= Passage(()).shortest:
            fitting = [budget for budget in budgets if TIMES * budget <= context] or [context // TIMES]
            other = replace(common, output_dir=common.output_dir / SEARCH, recipe=None, task="")
            budget = str(fitting[len(fitting) // 2])
            search = LayerSearch.check(LayerSettings(other, "tidal", budget, 1, settings.texts))
        most = len(tried) + (2 + bool(problems)) * (search is not None)
        total = min(wants, len(judged))
        begun = None if search is None or problems else held(search.target.settings.output_dir / PROBED, "count")
        found = cls(settings, wanted, target, budgets, judged, order, total, search, most, begun=begun, told=told)
        found._refuse_few(len(judged), "there are")
        return found

    @property
    def needed(self) -> int:
        """Texts on which a candidate can pass at all."""
        return FEWEST + promise.texts_needed(self.wanted, self.judged.asked)

    def _refuse_few(self, texts: int, why: str, more: str = "") -> None:
        """Raise a SaccadeError if no candidate could pass on so many texts."""
        option = self.judged.option
        if texts < self.needed:
            shown = promise.best_shown(texts - FEWEST, self.judged.asked)
            raise SaccadeError(
                f"--{option} {self.wanted:g}: {why} {texts} texts, which show {shown:.4f} at best; {self.needed} "
                f"texts are needed{more}: more texts, or a lower --{option}"
            )

    def timed(self) -> Tuning:
        """With the model loaded, and one text timed; with as many texts as fit into `--minutes`, or a SaccadeError."""
        model, limit = self.target.subject.load(), self.settings.minutes
        tried, standard = _families(self.target.earlier(shape_of_model(model)), self.settings), self.judged.standard
        ladders = [rungs(family, self.budgets, self.target.settings.context) for family in tried]
        # A family may have no candidate so small.
        specs = [str(ladder[len(ladder) // 2]) for ladder in ladders if ladder] or [DENSE]
        with self.judged.sweep(model) as sweep:
            taken = _seconds(sweep, self.order[0], [*standard, specs[0], *specs])
        reading, step = sum(taken[: len(standard) + 1]), fmean(taken[len(standard) + 1 :])

        def minutes(total: int) -> float:
            """Of a run: the layer search is one process, the rest is shared out."""
            first = min(self._searching(total), total)
            steps = first * self.most * len(self.budgets) + (total - first) * JUDGED
            workers = workers_for(total, cores=torch.get_num_threads(), threads=sweep.threads, device=model.device.type)
            alone = len(self.search.passages) * reading + self.search.units * step if self.search else 0.0
            return (alone + (total * reading + steps * step) / workers) / 60

        total = self.total
        if limit is not None:
            total = max((count for count in range(len(self.judged) + 1) if minutes(count) <= limit), default=0)
            takes = f", and {minutes(self.needed):.1f} minutes"
            self._refuse_few(total, f"in --minutes {limit:g} fit", takes)
        return replace(self, model=model, total=total, minutes=minutes(total))

    @property
    def design(self) -> str:
        """What will be tried, what that can show at best, and how long it takes, in one line."""
        first = len(self.searching)
        return (
            f"{self.total} texts, about {self.minutes or 0:.1f} minutes: {first} choose at most {JUDGED} candidates of "
            f"{self.most} families, {self.total - first} others judge these; without a loss they show "
            f"{promise.best_shown(self.total - first, self.judged.asked):.4f} at most, and {self.wanted:g} is wanted"
        )

    def _searching(self, total: int) -> int:
        """How many of so many texts choose who is judged: those that judges can spare."""
        if self.begun is not None:
            return min(self.begun, total)
        return max(min(SEARCHING, total // PART, total - promise.texts_needed(self.wanted, self.judged.asked)), FEWEST)

    @property
    def searching(self) -> tuple[int, ...]:
        """Numbers of the texts that choose who is judged."""
        return tuple(sorted(self.order[: self._searching(self.total)]))

    @property
    def judging(self) -> tuple[int, ...]:
        """Numbers of those that judge."""
        return tuple(sorted(self.order[self._searching(self.total) : self.total]))

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, at most."""
        more, tried = len(self.judged.standard), self.most * len(self.budgets)
        asked = len(self.searching) * (more + tried) + len(self.judging) * (more + JUDGED)
        return asked + (self.search.units if self.search else 0)

    def run(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Try, judge, choose; write results and the recipe."""
        model = self.target.subject.load() if self.model is None else self.model
        recipe = self.target.earlier(shape_of_model(model))
        if self.search is not None:
            search = self.search
            if isinstance(self.judged, KeyTokens):
                search = replace(search, passages=tuple(self.judged.passages[number] for number in self.searching))
            search.run(advance, model)
            searched = Recipe.read(search.target.recipe_path)
            found, scores = {**recipe.found, **searched.found}, {**recipe.scores, **searched.scores}
            own = {**recipe.layers, **searched.layers}
            recipe = replace(recipe, reselect=searched.reselect, layers=own, found=found, scores=scores)
        ladders, dense_bytes, left = self._ladders(model, recipe)
        with self.judged.sweep(model) as sweep:
            first, others = replace(sweep, part=self.searching), replace(sweep, part=self.judging)
            results = self._results(ladders, first, others, advance)
        results |= {"dense_bytes": dense_bytes, "left_out": left}
        written = self.target.write_results(RESULTS, results)
        self._write(written, recipe)
        return written

    def _ladders(self, model: Any, recipe: Recipe) -> tuple[Ladders, float, list[str]]:
        """Every family's specs that cost less than dense attention, its bytes per token, and who is left out."""
        shape, common = self.target.subject.shape, self.target.settings
        itemsize = torch.finfo(self.target.subject.dtype).bits // 8
        weight_bytes = weights_read(model, self.settings.batch) * itemsize
        states = state_bytes(model.config, self.target.subject.dtype)
        ladders, dense, left, seen = dict[str, Mapping[str, float]](), 0.0, list[str](), list[Policy]()
        for family in _families(recipe, self.settings):
            members = {}
            for policy in rungs(family, self.budgets, common.context):
                seen.append(policy)
                cost = cost_of(
                    policy.plan(shape), policy.rectify, shape, context=common.context, batch=self.settings.batch,
                    kv_itemsize=itemsize, weight_bytes=weight_bytes, state_bytes=states,
                )  # fmt: skip
                dense, told = cost.dense_total, served(policy, self.told)
                # By the share's 95% interval; of position 0 alone, a sparse step behind a dense cache as the probe's.
                if cost.total < dense and told and wilson(told.accepted[0], told.drafted[0])[1] < self.wanted:
                    kept = f"{told.accepted[0]:,} of {told.drafted[0]:,} first drafts were accepted"
                    left.append(f"{policy}: {kept} by {told.model or 'its server'}, as of {told.date}")
                elif cost.total < dense:
                    members[str(policy)] = cost.total
            if members:
                ladders[str(family)] = dict(sorted(members.items(), key=lambda member: -member[1]))
        if not ladders:
            why = f"; left out: {'; '.join(left)}" if left else ""
            raise SaccadeError(f"at a context of {common.context} no candidate reads less than dense attention{why}")
        idle = [one for one in self.told if all(served(policy, [one]) is None for policy in seen)]
        left += [f"what its server says of {one.policy}, which is no candidate" for one in idle]
        return ladders, dense, left

    def _results(self, ladders: Ladders, first: Sweep, others: Sweep, advance: Callable[[str], None]) -> dict[str, Any]:
        """Try all candidates on the texts that search, and judge some on the others: what stands in `tune.json`."""
        costs = {spec: cost for ladder in ladders.values() for spec, cost in ladder.items()}
        tried = self._told(first, [*costs], advance)
        # Texts that search say how many tokens or right answers there are, of the rarest kind too.
        most = promise.lossless(next(iter(tried.values())), len(others.numbers))
        searched = {spec: promise.judge(told, self.wanted).ratio for spec, told in tried.items()}
        going = promise.row(searched, costs, self._hopeful) if most >= self.wanted else []
        told = self._told(others, going, advance) if going else {}
        verdicts = {spec: promise.judge(one, self.wanted) for spec, one in told.items()}
        kept, shape = promise.walk(verdicts), self.target.subject.shape
        failed = [*verdicts][len(kept) :][:1]

        def status(spec: str) -> str:
            if spec in kept:
                return "kept"
            return "failed" if spec in failed else "behind a failed one" if spec in verdicts else "not judged"

        def verdict(spec: str) -> dict[str, Any]:
            found, told = verdicts.get(spec), served(Policy.from_spec(spec), self.told)
            shares = {"ratio": found and found.ratio, "shown": found and found.shown}
            return {**shares, "accepted": told and told.chances[0]}

        return {
            "measure": self.judged.option,
            "read": self.judged.name,
            "wanted": self.wanted,
            "alpha": ALPHA,
            "batch": self.settings.batch,
            "texts": {"searched": first.numbers, "judged": others.numbers},
            "n": int(sum(right.sum() for _, _, right in told[going[0]])) if going else 0,
            "best_shown": most,
            "rows": [
                {"family": family, "spec": spec, "bytes": costs[spec], "searched": searched[spec], **verdict(spec)}
                | {"status": status(spec), **terms_of(Policy.from_spec(spec), shape, self.target.settings.context)}
                for family, ladder in ladders.items()
                for spec in ladder
            ],
            "chosen": min(kept, key=lambda spec: costs[spec], default=None),
        }

    def _told(self, sweep: Sweep, specs: Sequence[str], advance: Callable[[str], None]) -> dict[str, Sequence[Tally]]:
        """Candidates on a sweep's texts. A text is read once for all of them."""
        sweep.run([*self.judged.standard, *specs], advance)
        self.judged.refuse(sweep)
        return {spec: self.judged.tallies(sweep, spec) for spec in specs}

    def _hopeful(self, ratio: float) -> bool:
        """Whether a candidate would pass that is as good on the texts that judge."""
        return promise.best_shown(len(self.judging), self.judged.asked, losing=max(1 - ratio, 0)) >= self.wanted

    def _write(self, results: dict[str, Any], earlier: Recipe) -> None:
        """The recipe: what was chosen, or dense if nothing keeps the promise."""
        chosen = next((row for row in results["rows"] if row["spec"] == results["chosen"]), None)
        found = {name: results[name] for name in ("measure", "read", "wanted", "batch", "n")}
        found |= {"chosen_by": "bytes per token", "texts": len(results["texts"]["judged"])}
        found |= {"confidence": 1 - ALPHA, "bound": chosen and round(chosen["shown"], 4)}
        scores = {DENSE: 1.0} if chosen is None else {chosen["spec"]: round(chosen["ratio"], 4)}
        policy = Policy.from_spec(results["chosen"] or DENSE)
        self.target.write_recipe("tune", replace(earlier, policy=policy), found=found, scores=scores)


def _families(recipe: Recipe, settings: TuneSettings) -> tuple[Policy, ...]:
    """Those that are tried. The probe's steps stand behind a clean cache, where rectification changes nothing."""
    found = families(recipe, settings.policies)
    if settings.policies or settings.common.task:
        return found
    return tuple(one for one in found if one.rectify is None or clean(one) not in found)


def _seconds(sweep: Sweep, number: int, specs: Sequence[str]) -> list[float]:
    """What each of these takes on a text that is read for the first; once before, so that kernels are made."""
    with on_threads(sweep.threads):
        for _ in range(2):
            ends = [time.perf_counter()]
            ends += [time.perf_counter() for _ in sweep.ask(number, specs)]
    return [end - begin for begin, end in pairwise(ends)]
