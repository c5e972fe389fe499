"""Gates that `python -m claims gates` has trained: whether they have decided, and how many are open."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

from saccade.calibrate.heads import THRESHOLD

from ..gates.choice import CHOICE, Choice, direct_of
from ..gates.variants import DIRECT, GREY
from ..judging.claim import Sample
from ..judging.effects import TEXTS
from ..judging.study import Study
from .trial import CHOSEN, as_chosen, file_conditions, trial_of


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained gates, a head in the place of a text; values are means over seeds.

    Arms are the trial's variants, `letter`, the paper's own, among them or not, `direct`, and `hardkuma`, the one that
    stands for the paper's, see `as_chosen`. Texts are `layer L, head H`; measures are `grey`, whether a gate lies
    between 0.1 and 0.9, and `open`, whether above one half.

    Attributes:
        file: its name in docs/results, see `named`.
        choice: what stands for HardKuma.
    """

    interval: ClassVar[str] = TEXTS

    file: str
    choice: Choice = CHOICE

    def units(self, study: Study) -> int:
        return 1

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        """The file's samples.

        Raises:
            SaccadeError: it is not there, nothing was asked under its roles, or it is no trial that `choice` is about.
        """
        trial = trial_of(self.file, study, self.choice)
        chosen, variants = self.choice.chosen(trial), [*dict.fromkeys(run["variant"] for run in trial["runs"])]
        arms = {variant: variant for variant in variants} | {DIRECT: direct_of(trial)}
        samples = [replace(one, arm=arm) for arm, variant in arms.items() for one in _samples(trial, variant)]
        samples += [as_chosen(sample, CHOSEN, chosen) for sample in _samples(trial, chosen or variants[0])]
        advance(self.file)
        return samples

    def conditions(self, study: Study) -> dict[str, Any]:
        return file_conditions(self.file, study, self.choice)


def _samples(trial: Mapping[str, Any], variant: str) -> Iterator[Sample]:
    runs = [run for run in trial["runs"] if run["variant"] == variant]
    for place, layer in enumerate(trial["layers"]):
        for head in range(trial["kv_heads"]):
            values = [run["values"][place][head] for run in runs]
            grey = fmean(GREY[0] < value < GREY[1] for value in values)
            told = {"grey": grey, "open": fmean(value > THRESHOLD for value in values)}
            yield Sample(f"layer {layer}, head {head}", variant, told)
