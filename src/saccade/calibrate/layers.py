"""Which layers re-select: every candidate's steps on key tokens of any text, and its answers if questions are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..adapters.hf.probe import FINALISTS, WALK, Attach, Kind, Passage, Probe, Told, texts_that_fit
from ..adapters.hf.support import refuse_rewinding
from ..checkpoints.shape import shape_of_model
from ..errors import SaccadeError
from ..eval.divergence import Divergence, attached_once, record
from ..eval.entry import parse_budgets
from ..methods.policy import Policy
from ..methods.registry import policies
from ..plans.plan import candidates
from ..recipes.recipe import method_of
from .ledger import Ledger
from .passages import Texts
from .sweep import Outcome
from .target import Target, TargetSettings

PROBED, RESULTS, KEY = "probe.jsonl", "layers.json", ("text", "spec", "walk")
FEWEST_TEXTS, FEWEST_KEYS = 16, 256
"""What a choice rests on at least, or it is said."""
ENOUGH = 0.99
"""Share of key tokens whose likeliest token stays, which the recipe's budget must reach, if one of those tried does."""

Candidate = tuple[int, ...]
"""Layers that select again, beside the first that selects."""


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What the user can choose; see `saccade calibrate layers --help`."""

    common: TargetSettings
    policy: str
    budgets: str
    most: int
    texts: Path | None = None
    passages: int = 16


@dataclass(frozen=True)
class LayerSearch:
    """A checked search for at most so many layers where a policy selects again, at some budgets; `run` it."""

    target: Target
    policy: Policy
    budgets: tuple[int, ...]
    most: int
    texts: Texts
    passages: tuple[Passage, ...]

    @classmethod
    def check(cls, settings: LayerSettings) -> LayerSearch:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        target, spec = Target.check(settings.common), settings.policy
        policy, shape = Policy.from_spec(spec), target.subject.shape
        if "reselect" not in type(policy.options).model_fields:
            valid = (name for name, method in policies().items() if "reselect" in method.defaults)
            raise SaccadeError(f"--policy {spec!r} has no re-selection layer; valid: {', '.join(valid)}")
        if {"reselect", "budget"} & policy.options.model_fields_set:
            raise SaccadeError(f"--policy {spec!r}: reselect and budget are what is searched; leave them out")
        budgets = tuple(sorted(parse_budgets(settings.budgets)))
        texts = Texts.of(settings.texts, settings.common.context, budgets, target.subject.positions)
        found = cls(target, policy, budgets, settings.most, texts, ())
        for tried in found.specs(found.candidates):
            Policy.from_spec(tried).plan(shape)
        refuse_rewinding(policy, shape)
        if settings.common.task:
            target.problems()
        return replace(found, passages=tuple(texts.passages(target.subject.tokenizer, settings.passages)))

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What is tried first."""
        return candidates(self.target.subject.shape, int(self.policy.options.model_dump()["dense_layers"]))

    def specs(self, candidates: Sequence[Candidate]) -> list[str]:
        """The policy with each candidate at each budget."""
        given, name = self.policy.options.model_dump(exclude_unset=True), self.policy.name
        pairs = ({"reselect": candidate, "budget": budget} for candidate in candidates for budget in self.budgets)
        return [Policy.create(name, {**given, **pair}).to_spec() for pair in pairs]

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, at most."""
        specs, asked = len(self.specs(self.candidates)) * self.most, 0
        walks = len(self.specs(self.candidates[:FINALISTS])) * self.most
        if self.target.settings.task:
            asked = len(self.target.problems()) * (1 + specs)
        return len(self.passages) * (specs + walks) + asked

    def run(self, advance: Callable[[str], None], model: Any = None) -> dict[str, Any]:
        """Search, write the results and the recipe; what the folder already holds is not done again.

        `model`: the loaded one; None: it is loaded.
        """
        model = self.target.subject.load() if model is None else model
        earlier = self.target.earlier(shape_of_model(model))
        about = {name: self.target.about()[name] for name in ("model", "weights", "context", "dtype")}
        about |= {"policy": str(self.policy), "texts": self.texts.name, "passages": self.texts.sha256(self.passages)}
        about |= {"count": len(self.passages)}
        with Ledger(self.target.settings.output_dir / PROBED, about, KEY) as ledger:
            probing = Probing(model, self, ledger, advance, texts_that_fit(model, self.texts.length))
            tried, steps = probing.tried(self.candidates), list[dict[str, Any]]()
            chosen = min(tried, key=lambda one: tried[one].order)
            while len(chosen) < self.most and (wider := self._wider(chosen)):
                tried |= (more := probing.tried(wider))
                best = min(wider, key=lambda one: more[one].order)
                gain = tried[best].walked[-1].interval(tried[chosen].walked[-1])
                steps.append({"from": chosen, "to": best, "gain": gain, "taken": gain is not None and gain[0] > 0})
                if not steps[-1]["taken"]:
                    break
                chosen = best
        asked = self._asked(model, self.specs([*tried]), advance) if self.target.settings.task else {}
        if asked:
            right = {one: sum(asked[spec].correct for spec in self.specs([one])) for one in tried}
            chosen = min(tried, key=lambda one: (-right[one], tried[one].order))
        others = (one for one in tried if len(one) <= 1 and one != chosen)
        second = min(others, key=lambda one: tried[one].order, default=None)
        keys = tried[chosen].stepped[0].keys
        if not keys:
            what = "no token needs a long context, so no layer can be told from another"
            raise SaccadeError(f"{self.texts.name}: {what}; choose other --texts")
        margin = None if second is None or asked else tried[chosen].walked[-1].interval(tried[second].walked[-1])
        results = {
            "policy": str(self.policy),
            "budgets": list(self.budgets),
            "passages": len(self.passages),
            "tokens": self.texts.length,
            "keys": keys,
            "walk": WALK,
            **({"dense": asked["dense"].to_dict()} if asked else {}),
            "rows": [
                {"reselect": list(one), "budget": budget, **found.to_dict()}
                | ({"walked": outcomes.walked[place].to_dict()} if outcomes.walked else {})
                | ({"asked": asked[found.spec].to_dict()} if asked else {})
                for one, outcomes in tried.items()
                for place, (budget, found) in enumerate(zip(self.budgets, outcomes.stepped, strict=True))
            ],
            "chosen": list(chosen),
            "second": second,
            "margin": margin,
            "further_layers": steps,
            "notes": self._notes(keys, margin, asked=bool(asked), told=second is not None and not asked),
        }
        written = self.target.write_results(RESULTS, results)
        method = method_of(self.policy)
        listed = chosen if earlier.reselect in (None, earlier.layers.get(method)) else earlier.reselect
        known = replace(earlier, reselect=listed, layers={**earlier.layers, method: chosen})
        if not known.tuned:
            kept = next((one for one in tried[chosen].last if one.kept >= ENOUGH), tried[chosen].last[-1])
            known = replace(known, policy=Policy.from_spec(kept.spec))
        found = {name: results[name] for name in ("policy", "budgets", "passages", "keys", "second", "margin", "notes")}
        scores = {one.spec: {"merit": one.merit, "interval": one.interval()} for one in tried[chosen].last}
        self.target.write_recipe(
            f"calibrate layers --policy {method}", known, {**found, "texts": self.texts.name}, scores
        )
        return written

    def _wider(self, chosen: Candidate) -> list[Candidate]:
        """Those with one layer more."""
        return [tuple(sorted({*chosen, layer})) for (layer,) in self.candidates[1:] if layer not in chosen]

    def _asked(self, model: Any, specs: Sequence[str], advance: Callable[[str], None]) -> dict[str, Outcome]:
        """What dense attention and every candidate answer."""
        with self.target.sweep(model, self.target.problems(), policy=str(self.policy)) as sweep:
            sweep.run(["dense", *specs], advance)
            found = {spec: sweep.outcome(spec) for spec in ("dense", *specs)}
        consequence = "no layer can be told from another by it"
        self.target.refuse_unanswered(found["dense"].correct, found["dense"].count, consequence)
        return found

    def _notes(self, keys: int, margin: tuple[float, float] | None, *, asked: bool, told: bool) -> list[str]:
        """What the user should know about the choice."""
        notes, texts = ["chosen by right answers"] if asked else [], len(self.passages)
        if texts < FEWEST_TEXTS or keys < FEWEST_KEYS:
            notes.append(f"{texts} texts, {keys} key tokens: a choice should rest on {FEWEST_TEXTS} and {FEWEST_KEYS}")
        if told and (margin is None or margin[0] <= 0):
            notes.append("the best cannot be told from the second: both stay candidates; more --passages may tell")
        return notes


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate at every budget: what one step makes of key tokens, and steps in a row if it is a finalist."""

    stepped: tuple[Divergence, ...]
    walked: tuple[Divergence, ...]

    @property
    def last(self) -> tuple[Divergence, ...]:
        """What it is judged by."""
        return self.walked or self.stepped

    @property
    def order(self) -> tuple[bool, float]:
        """Less is better; over all budgets."""
        return not self.walked, _merit(self.last)


@dataclass(frozen=True, slots=True)
class Probing:
    """The probe of a search's texts: as many at once as fit, in the ledger as they come."""

    model: Any
    search: LayerSearch
    ledger: Ledger
    advance: Callable[[str], None]
    together: int
    held: dict[int, Probe] = field(default_factory=dict)

    def tried(self, candidates: Sequence[Candidate]) -> dict[Candidate, Tried]:
        """Every candidate by one step, and by steps in a row the best of them."""
        stepped = self._measured(candidates, 1)
        walked = self._measured(sorted(stepped, key=lambda one: _merit(stepped[one]))[:FINALISTS], WALK)
        return {one: Tried(stepped[one], walked.get(one, ())) for one in candidates}

    def _measured(self, candidates: Sequence[Candidate], walk: int) -> dict[Candidate, tuple[Divergence, ...]]:
        search, places, records = self.search, range(len(self.search.passages)), self.ledger.records
        with attached_once(self.model) as attach:
            for first in places[:: self.together]:
                texts = places[first : first + self.together]
                for spec in search.specs(candidates):
                    missing = [text for text in texts if (text, spec, walk) not in records]
                    told = self._probe(texts, attach, spec, walk) if missing else []
                    for text in missing:
                        self.ledger.add({"text": text, "spec": spec, "walk": walk, **record(told[text - first])})
                        self.advance(spec)
        return {
            one: tuple(Divergence(spec, [records[text, spec, walk] for text in places]) for spec in search.specs([one]))
            for one in candidates
        }

    def _probe(self, texts: range, attach: Attach | None, spec: str, walk: int) -> list[dict[Kind, Told]]:
        """What a policy makes of some texts, which are read once if all fit."""
        if texts.start not in self.held:
            self.held.clear()
            passages = [self.search.passages[text] for text in texts]
            self.held[texts.start] = Probe(self.model, passages, attach=attach, keys_alone=True)
        return self.held[texts.start].measure(Policy.from_spec(spec), self.search.target.subject.tokenizer, walk=walk)


def _merit(outcomes: Sequence[Divergence]) -> float:
    """Over all budgets."""
    return sum(one.merit for one in outcomes)


def name(reselect: Sequence[int]) -> str:
    """What a candidate is called in results."""
    return "+".join(map(str, reselect)) or "none"
