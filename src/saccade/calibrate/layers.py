"""Which layers re-select: every candidate's steps on key tokens of any text, and its answers if questions are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..adapters.hf.probe import Passage, Probe
from ..adapters.hf.run import attached
from ..checkpoints.shape import shape_of_model
from ..errors import SaccadeError
from ..methods.policy import Policy
from .divergence import Divergence, record
from .ledger import Ledger
from .passages import Texts
from .reselecting import Candidate, Reselecting
from .sweep import Outcome
from .target import Target, TargetSettings

PROBED, RESULTS = "probe.jsonl", "layers.json"
FEWEST_TEXTS, FEWEST_KEYS = 16, 256
"""What a choice rests on at least, or it is said."""
ENOUGH = 0.99
"""Share of key tokens whose likeliest token stays, which the recipe's budget must reach, if one of those tried does."""


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
    """A checked search for at most so many layers where a policy selects again; `run` it."""

    target: Target
    layers: Reselecting
    most: int
    texts: Texts
    passages: tuple[Passage, ...]

    @classmethod
    def check(cls, settings: LayerSettings) -> LayerSearch:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        target = Target.check(settings.common)
        layers = Reselecting.check(settings.policy, settings.budgets, target.subject.shape)
        texts = Texts.of(settings.texts, settings.common.context, layers.budgets, target.subject.positions)
        if settings.common.task:
            target.problems()
        passages = tuple(texts.passages(target.subject.tokenizer, settings.passages))
        return cls(target, layers, settings.most, texts, passages)

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, at most."""
        specs, asked = len(self.layers.specs(self.layers.candidates)) * self.most, 0
        if self.target.settings.task:
            asked = len(self.target.problems()) * (1 + specs)
        return len(self.passages) * specs + asked

    def run(self, advance: Callable[[str], None], model: Any = None) -> dict[str, Any]:
        """Search, write the results and the recipe; what the folder already holds is not done again.

        `model`: the loaded one; None: it is loaded.
        """
        model, layers = self.target.subject.load() if model is None else model, self.layers
        earlier = self.target.earlier(shape_of_model(model))
        about = {name: self.target.about()[name] for name in ("model", "weights", "context", "dtype")}
        about |= {"policy": str(layers.policy), "texts": self.texts.name, "passages": self.texts.sha256(self.passages)}
        with Ledger(self.target.settings.output_dir / PROBED, about, ("text", "spec")) as ledger:
            tried, steps = self._probed(model, ledger, layers.candidates, advance), list[dict[str, Any]]()
            chosen = min(tried, key=lambda one: _merit(tried[one]))
            while len(chosen) < self.most and (wider := layers.wider(chosen)):
                tried |= self._probed(model, ledger, wider, advance)
                best = min(wider, key=lambda one: _merit(tried[one]))
                gain = tried[best][-1].interval(tried[chosen][-1])
                steps.append({"from": chosen, "to": best, "gain": gain, "taken": gain is not None and gain[0] > 0})
                if not steps[-1]["taken"]:
                    break
                chosen = best
        asked = self._asked(model, layers.specs([*tried]), advance) if self.target.settings.task else {}
        if asked:
            right = {one: sum(asked[spec].correct for spec in layers.specs([one])) for one in tried}
            chosen = min(tried, key=lambda one: (-right[one], _merit(tried[one])))
        others = (one for one in tried if len(one) <= 1 and one != chosen)
        second = min(others, key=lambda one: _merit(tried[one]), default=None)
        keys = tried[chosen][0].keys
        if not keys:
            what = "no token needs a long context, so no layer can be told from another"
            raise SaccadeError(f"{self.texts.name}: {what}; choose other --texts")
        margin = None if second is None or asked else tried[chosen][-1].interval(tried[second][-1])
        results = {
            "policy": str(layers.policy),
            "budgets": list(layers.budgets),
            "passages": len(self.passages),
            "tokens": self.texts.length,
            "keys": keys,
            **({"dense": asked["dense"].to_dict()} if asked else {}),
            "rows": [
                {"reselect": list(one), "budget": budget, **found.to_dict()}
                | ({"asked": asked[found.spec].to_dict()} if asked else {})
                for one, outcomes in tried.items()
                for budget, found in zip(layers.budgets, outcomes, strict=True)
            ],
            "chosen": list(chosen),
            "second": second,
            "margin": margin,
            "further_layers": steps,
            "notes": self._notes(keys, margin, asked=bool(asked)),
        }
        written = self.target.write_results(RESULTS, results)
        known = replace(earlier, reselect=chosen)
        if not known.tuned:
            kept = next((one for one in tried[chosen] if one.kept >= ENOUGH), tried[chosen][-1])
            known = replace(known, policy=Policy.from_spec(kept.spec))
        found = {name: results[name] for name in ("policy", "budgets", "passages", "keys", "second", "margin", "notes")}
        scores = {one.spec: {"merit": one.merit, "interval": one.interval()} for one in tried[chosen]}
        self.target.write_recipe("calibrate layers", known, {**found, "texts": self.texts.name}, scores)
        return written

    def _probed(
        self, model: Any, ledger: Ledger, candidates: Sequence[Candidate], advance: Callable[[str], None]
    ) -> dict[Candidate, list[Divergence]]:
        """Every candidate at every budget on every passage; attaching takes as long as a step, and is done once."""
        specs, places = self.layers.specs(candidates), range(len(self.passages))
        separate = self.layers.shape.kinds or self.layers.shape.sources
        with nullcontext() if separate else attached(model, Policy.from_spec("dense"), None):
            for number, passage in enumerate(self.passages):
                if missing := [spec for spec in specs if (number, spec) not in ledger.records]:
                    probe = Probe(model, passage, attach=attached if separate else None, keys_alone=True)
                for spec in missing:
                    told = probe.measure(Policy.from_spec(spec), self.target.subject.tokenizer)
                    ledger.add({"text": number, "spec": spec, **record(told)})
                    advance(spec)

        def found(spec: str) -> Divergence:
            return Divergence(spec, [ledger.records[number, spec] for number in places])

        return {one: [found(spec) for spec in self.layers.specs([one])] for one in candidates}

    def _asked(self, model: Any, specs: Sequence[str], advance: Callable[[str], None]) -> dict[str, Outcome]:
        """What dense attention and every candidate answer."""
        with self.target.sweep(model, self.target.problems(), policy=str(self.layers.policy)) as sweep:
            sweep.run(["dense", *specs], advance)
            found = {spec: sweep.outcome(spec) for spec in ("dense", *specs)}
        consequence = "no layer can be told from another by it"
        self.target.refuse_unanswered(found["dense"].correct, found["dense"].count, consequence)
        return found

    def _notes(self, keys: int, margin: tuple[float, float] | None, *, asked: bool) -> list[str]:
        """What the user should know about the choice."""
        notes, texts = ["chosen by right answers"] if asked else [], len(self.passages)
        if texts < FEWEST_TEXTS or keys < FEWEST_KEYS:
            notes.append(f"{texts} texts, {keys} key tokens: a choice should rest on {FEWEST_TEXTS} and {FEWEST_KEYS}")
        if not asked and (margin is None or margin[0] <= 0):
            notes.append("the best cannot be told from the second: both stay candidates; more --passages may tell")
        return notes


def _merit(outcomes: Sequence[Divergence]) -> float:
    """Over all budgets."""
    return sum(one.merit for one in outcomes)
