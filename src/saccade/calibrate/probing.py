"""Which layers re-select, by the probe: no questions, every candidate's steps on key tokens of any text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..adapters.hf.probe import Passage, Probe
from ..checkpoints.shape import shape_of_model
from ..errors import SaccadeError
from ..methods.policy import Policy
from .divergence import Divergence, record
from .ledger import Ledger
from .passages import Texts
from .reselecting import Candidate, Reselecting
from .target import Target, TargetSettings

LEDGER, RESULTS = "probe.jsonl", "layers.json"
TIMES, FEWEST_TEXTS, FEWEST_KEYS = 4, 16, 256
"""A text is as many times as long as a budget; what a choice rests on at least, or it is said."""
ENOUGH = 0.99
"""Share of key tokens whose likeliest token stays, which the recipe's budget must reach, if one of those tried does."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """What the user can choose; see `saccade calibrate layers --help`."""

    common: TargetSettings
    policy: str
    budgets: str
    most: int
    texts: Path | None
    passages: int


@dataclass(frozen=True)
class ProbeSearch:
    """A checked search; `run` it."""

    target: Target
    layers: Reselecting
    most: int
    texts: Texts
    passages: tuple[Passage, ...]

    @classmethod
    def check(cls, settings: ProbeSettings) -> ProbeSearch:
        """Resolve settings, or raise a SaccadeError: one line about the first that is not valid."""
        # What the probe decodes is one batch, which takes the threads that a prompt would.
        target = Target.check(replace(settings.common, threads=torch.get_num_threads()))
        layers = Reselecting.check(settings.policy, settings.budgets, target.subject.shape)
        context, least = settings.common.context, max(TIMES * max(layers.budgets), Passage((), 0).shortest)
        positions = target.subject.positions
        if not least <= context <= positions:
            raise SaccadeError(
                f"--context {context} is not valid: the probe reads texts of {least:,} tokens or more, {TIMES} times "
                f"the largest budget; the model has {positions:,} positions"
            )
        texts = Texts(settings.texts, context, least)
        passages = tuple(texts.passages(target.subject.tokenizer, settings.passages))
        return cls(target, layers, settings.most, texts, passages)

    @property
    def units(self) -> int:
        """Pieces of work of a whole run, at most."""
        return len(self.passages) * len(self.layers.specs(self.layers.candidates)) * self.most

    def run(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Search, write the results and the recipe; what the folder already holds is not done again."""
        model = self.target.subject.load()
        earlier = self.target.earlier(shape_of_model(model))
        about = {**self.target.about(), "policy": str(self.layers.policy), "texts": self.texts.name}
        about["passages"] = self.texts.sha256(self.passages)
        with Ledger(self.target.settings.output_dir / LEDGER, about, ("text", "spec")) as ledger:
            tried, steps = self._measured(model, ledger, self.layers.candidates, advance), []
            ranked = sorted(tried, key=lambda one: _merit(tried[one]))
            chosen = ranked[0]
            for _ in range(self.most - len(chosen)):
                wider = self.layers.wider(chosen)
                if not wider:
                    break
                tried |= self._measured(model, ledger, wider, advance)
                best = min(wider, key=lambda one: _merit(tried[one]))
                gain = tried[best][-1].interval(tried[chosen][-1])
                taken = gain is not None and gain[0] > 0
                steps.append({"from": chosen, "to": best, "gain": gain, "taken": taken})
                if not taken:
                    break
                chosen = best
        single = [one for one in ranked if one != chosen and len(one) <= 1]
        rest = self._margin(tried, chosen, single[0]) if single else None
        keys = tried[chosen][0].keys
        notes = self._notes(keys, rest)
        results = {
            "policy": str(self.layers.policy),
            "budgets": list(self.layers.budgets),
            "passages": len(self.passages),
            "tokens": self.texts.length,
            "keys": keys,
            "rows": [
                {"reselect": list(one), "budget": budget, **found.to_dict()}
                for one, outcomes in tried.items()
                for budget, found in zip(self.layers.budgets, outcomes, strict=True)
            ],
            "chosen": list(chosen),
            "second": list(single[0]) if single else None,
            "margin": rest,
            "further_layers": steps,
            "notes": notes,
        }
        if not keys:
            raise SaccadeError(
                f"{self.texts.name}: no token needs a long context, so all layers look alike; other --texts"
            )
        written = self.target.write_results(RESULTS, results)
        kept = next((one for one in tried[chosen] if _kept(one) >= ENOUGH), tried[chosen][-1])
        known = replace(earlier, reselect=chosen)
        known = known if known.tuned else replace(known, policy=Policy.from_spec(kept.spec))
        found = {name: results[name] for name in ("policy", "budgets", "passages", "keys", "second", "margin", "notes")}
        scores = {one.spec: {"merit": one.merit, "interval": one.interval()} for one in tried[chosen]}
        self.target.write_recipe("calibrate layers", known, {**found, "texts": self.texts.name}, scores)
        return written

    def _measured(
        self, model: Any, ledger: Ledger, candidates: Sequence[Candidate], advance: Callable[[str], None]
    ) -> dict[Candidate, list[Divergence]]:
        """Every candidate at every budget on every passage."""
        specs = self.layers.specs(candidates)
        for number, passage in enumerate(self.passages):
            missing = [spec for spec in specs if (number, spec) not in ledger.records]
            if not missing:
                continue
            probe = Probe(model, passage, keys_alone=True)
            for spec in missing:
                told = probe.measure(Policy.from_spec(spec), self.target.subject.tokenizer)
                ledger.add({"text": number, "spec": spec, **record(told)})
                advance(spec)
        return {
            one: [
                Divergence(spec, [ledger.records[number, spec] for number in range(len(self.passages))])
                for spec in self.layers.specs([one])
            ]
            for one in candidates
        }

    def _margin(
        self, tried: dict[Candidate, list[Divergence]], chosen: Candidate, second: Candidate
    ) -> tuple[float, float] | None:
        """By how much the chosen one is better than the second, at the largest budget."""
        return tried[chosen][-1].interval(tried[second][-1])

    def _notes(self, keys: int, margin: tuple[float, float] | None) -> list[str]:
        notes = list[str]()
        if len(self.passages) < FEWEST_TEXTS or keys < FEWEST_KEYS:
            notes.append(
                f"{len(self.passages)} texts with {keys} key tokens: fewer than {FEWEST_TEXTS} and {FEWEST_KEYS}, on "
                "which a choice should rest"
            )
        if margin is None or margin[0] <= 0:
            notes.append("the best cannot be told from the second: both are candidates; more --passages may tell")
        return notes


def _merit(outcomes: Sequence[Divergence]) -> float:
    """Over all budgets."""
    return sum(one.merit for one in outcomes)


def _kept(found: Divergence) -> float:
    """Share of key tokens whose likeliest token is dense attention's, of the kind that keeps fewest."""
    return min((share for share in found.mean("equal", key=True).values() if share is not None), default=0.0)
