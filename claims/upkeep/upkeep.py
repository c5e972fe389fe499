"""The experiment: texts are read densely, then every index is brought up token by token and measured now and then."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from scipy.stats import t

from saccade.decode.recall import recall_of
from saccade.plans.plan import Plan

from .capture import Reading, read
from .names import VARIANTS, Upkeep
from .texts import Stretch
from .variants import Kept

REFERENCE = {"rebuilt": "replanted", "rebuilt-whole": "replanted"}
"""What is compared at every length of every text: the first with the second."""


class Place(NamedTuple):
    """Where a mean belongs."""

    budget: int
    decoded: int
    variant: str


class Mean(NamedTuple):
    """Of one text: recalls as means over layers, query heads and queries; the largest cluster of all heads."""

    attention: float
    token: float
    largest_cluster: float | None


@dataclass
class Experiment:
    """`run` it, then read `rows` and `differences`, which are also right in the middle of it.

    Attributes:
        model: loaded, in eval mode.
        levels: delimiter level of every vocabulary id.
        texts: what is read.
        plans: by upkeep and budget.
        variants: names of what is measured.
        layers: those that `lychee_cluster` chooses in.
        prompt, tokens, every: tokens read at once, tokens decoded then, and from one measurement to the next.
        queries, spacing: how many a measurement takes, and every how many tokens.
    """

    model: Any
    levels: Sequence[int]
    texts: Sequence[Stretch]
    plans: Mapping[tuple[Upkeep, int], Plan]
    variants: Sequence[str]
    layers: Sequence[int]
    prompt: int
    tokens: int
    every: int
    queries: int
    spacing: int
    _means: dict[Place, dict[int, Mean]] = field(init=False, default_factory=lambda: defaultdict(dict))

    @property
    def measured(self) -> range:
        """Decoded tokens before each measurement."""
        return range(0, self.tokens + 1, self.every)

    @property
    def budgets(self) -> list[int]:
        return list(dict.fromkeys(budget for _, budget in self.plans))

    @property
    def units(self) -> int:
        """A query of the dense reading, or a measurement of one budget."""
        return len(self.texts) * len(self.measured) * (self.queries + len(self.budgets))

    def run(self, advance: Callable[[str], None]) -> None:
        """Measure everything, text by text. Interrupt it at will."""
        starts = (self.prompt + decoded for decoded in self.measured)
        watched = [start + query * self.spacing for start in starts for query in range(self.queries)]
        for number, text in enumerate(self.texts):
            reading = read(self.model, text.tokens, watched, advance)
            for budget in self.budgets:
                self._decode(number, reading, budget, advance)

    def rows(self) -> list[dict[str, Any]]:
        """One row per budget, decoded length and variant that was measured."""
        return [_row(place, list(texts.values())) for place, texts in self._means.items()]

    def differences(self) -> list[dict[str, Any]]:
        """The largest difference, of any text at any length, of an index kept up to one that is built anew."""
        found = []
        for budget in self.budgets:
            for anew, kept in REFERENCE.items():
                pairs = [
                    (mean, self._means[place._replace(variant=kept)][text])
                    for place, texts in list(self._means.items())
                    if place.budget == budget and place.variant == anew and kept in self.variants
                    for text, mean in texts.items()
                ]
                if pairs:
                    attention = max((own.attention - other.attention for other, own in pairs), key=abs)
                    token = max((own.token - other.token for other, own in pairs), key=abs)
                    named = {"budget": budget, "of": kept, "to": anew}
                    found.append({**named, "attention": round(attention, 6), "token": round(token, 6)})
        return found

    @torch.inference_mode()
    def _decode(self, text: int, reading: Reading, budget: int, advance: Callable[[str], None]) -> None:
        """Bring all indexes up through one text under one budget."""
        upkeeps = dict.fromkeys(VARIANTS[name].upkeep for name in self.variants)

        def kept(upkeep: Upkeep, past: int) -> Kept:
            return Kept(self.plans[upkeep, budget], self.levels, reading, self.prompt, past)

        running = {upkeep: kept(upkeep, self.prompt) for upkeep in upkeeps if not upkeep.anew}
        seen: dict[str, list[Mean]] = defaultdict(list)
        span = (self.queries - 1) * self.spacing
        for decoded in range(self.measured[-1] + span + 1):
            length, since = self.prompt + decoded + 1, decoded % self.every
            if since == 0:
                running |= {upkeep: kept(upkeep, length - 1) for upkeep in upkeeps if upkeep.anew}
            rows = reading.rows(length)
            views = {layer: reading.view(layer, rows) for layer in self.layers}
            for upkeep, one in running.items():
                # Between measurements nobody looks at an index that is built anew for the next one.
                if since <= span or not upkeep.anew:
                    one.step(length, views)
            if since <= span and since % self.spacing == 0:
                for name in self.variants:
                    variant = VARIANTS[name]
                    for layer, view in views.items():
                        q, softmax = reading.queries[length, layer], reading.softmaxes[layer]
                        one = running[variant.upkeep]
                        recall = recall_of(q, view, one.choose(variant.order, layer, q, view, softmax.scale), softmax)
                        largest = one.largest_cluster(layer, view)
                        seen[name].append(Mean(float(recall.attention.mean()), float(recall.token.mean()), largest))
            if since == span:
                for name, values in seen.items():
                    self._means[Place(budget, decoded - since, name)][text] = _mean(values)
                seen.clear()
                advance(f"text {text + 1}, budget {budget:,}, {decoded - since:,} tokens")


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of a mean of independent values by Student's t; None of fewer than two."""
    if len(values) < 2:
        return None
    reach = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return fmean(values) - reach, fmean(values) + reach


def _mean(values: Sequence[Mean]) -> Mean:
    attention, token = (fmean(getattr(value, name) for value in values) for name in ("attention", "token"))
    return Mean(attention, token, _largest(values))


def _largest(values: Sequence[Mean]) -> float | None:
    return max((value.largest_cluster for value in values if value.largest_cluster is not None), default=None)


def _row(place: Place, texts: Sequence[Mean]) -> dict[str, Any]:
    row: dict[str, Any] = {**place._asdict(), "texts": len(texts), "largest_cluster": _largest(texts)}
    for name in ("attention", "token"):
        values = [getattr(mean, name) for mean in texts]
        row |= {name: fmean(values), f"{name}_interval": mean_interval(values), f"{name}_by_text": values}
    return row
