"""The probe's order of the layers that may select again, beside right answers about texts that it has not read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from scipy.stats import spearmanr

from saccade.calibrate.layers import LayerSearch, LayerSettings
from saccade.calibrate.target import TargetSettings

from ..judging.claim import Sample
from ..judging.study import Study
from .questions import Questions
from .texts import OfQuestions


@dataclass(frozen=True, slots=True)
class Ordering(OfQuestions):
    """Questions under every candidate, as `Questions` asks them, and `saccade calibrate layers` without a question.

    Arms are `dense`, every candidate's spec, `METHOD, chosen`, the one that the probe takes, and `METHOD, order`, whose
    measure `order` is what a text adds to Spearman's correlation of candidates, less divergence of one step with more
    right answers of all texts: the mean is that correlation, the spread the jackknife's. What the probe has read stays
    as it is: intervals are over texts that are asked.

    Attributes:
        methods: whose layers are looked for.
        budget: of all candidates.
        task: how facts are stated; see `saccade calibrate layers --task`.
        length: tokens of texts and passages.
        texts, asked, seed: see `Questions`.
        passages: that the probe reads: two of a prompt, 16 in `saccade calibrate layers`.
    """

    task: str
    methods: tuple[str, ...] = ("tidal", "less_is_more")
    budget: int = 256
    length: int = 2048
    texts: int = 6
    asked: int = 12
    passages: int = 4
    seed: int = 32

    def units(self, study: Study) -> int:
        searches = self._searches(study)
        return self._questions(searches).units(study) + sum(search.units for search in searches.values())

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        searches = self._searches(study)
        samples = [*self._questions(searches).run(study, advance)]
        for method, search in searches.items():
            samples += of_probe(method, search.run(advance), samples)
        return samples

    def _searches(self, study: Study) -> dict[str, LayerSearch]:
        def search(method: str) -> LayerSearch:
            target = TargetSettings(
                study.model, "", self.length, 0, study.folder / method, None, study.device, study.dtype, self.seed,
                study.threads,
            )  # fmt: skip
            return LayerSearch.check(LayerSettings(target, method, str(self.budget), 1, passages=self.passages))

        return {method: search(method) for method in self.methods}

    def _questions(self, searches: Mapping[str, LayerSearch]) -> Questions:
        tried = [spec for one in searches.values() for spec in one.specs(one.candidates)]
        lengths = (self.length, self.length)
        return Questions(("dense", *tried), self.task, lengths, self.texts, self.asked, seed=self.seed)


def of_probe(method: str, found: Mapping[str, Any], answered: Sequence[Sample]) -> Iterator[Sample]:
    """Samples of one method: what the probe chose, and its order, beside what was `answered`."""
    rows = found["rows"]
    held = {spec: [one for one in answered if one.arm == spec] for spec in (row["spec"] for row in rows)}
    (chosen,) = (row["spec"] for row in rows if row["reselect"] == found["chosen"])
    right = numpy.array([[one.values["right"] for one in held[row["spec"]]] for row in rows])
    orders = _parts([-row["merit"] for row in rows], right)
    for one, order in zip(held[chosen], orders, strict=True):
        yield Sample(one.text, f"{method}, chosen", one.values)
        yield Sample(one.text, f"{method}, order", {"order": order})


def _parts(merits: Sequence[float], right: numpy.ndarray[Any, Any]) -> list[float]:
    """What each text adds to the rank correlation of merits with right answers `[candidates, texts]`.

    By how much the correlation falls without it, n - 1 times, above the mean text, which adds the correlation itself.
    """
    # Shares are of whole questions: what differs by rounding alone is a tie.
    whole = right.sum(1)
    without = numpy.array([spearmanr(merits, (whole - one).round(6)).statistic for one in right.T])
    correlation = spearmanr(merits, whole.round(6)).statistic
    found: list[float] = (correlation + (len(without) - 1) * (without.mean() - without)).tolist()
    return found
