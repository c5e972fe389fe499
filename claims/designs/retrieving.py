"""Questions under the roles of trained gates, cut to any number of heads, and under other policies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from saccade.calibrate.heads import best_heads, head_list
from saccade.errors import SaccadeError
from saccade.types import ModelShape

from ..gates.choice import CHOICE, Choice, direct_of, heads_of
from ..gates.scaled import LETTER
from ..gates.variants import DIRECT
from ..judging.claim import Sample
from ..judging.study import Study
from .questions import Questions
from .texts import OfTexts
from .trial import CHOSEN, as_chosen, file_conditions, trial_of


@dataclass(frozen=True, slots=True)
class Retrieving(OfTexts):
    """As `Questions`; a gate's rank decides whether its head is among so many that retrieve.

    Arms are the `others`, and `GATES COUNT, seed S, budget B`, where GATES is `hardkuma`, the variant that stands for
    the paper's, see `as_chosen`, or `letter`, the paper's own, or `direct`; where none stands, none is asked.

    Attributes:
        file: of the trial, in docs/results, see `named`.
        counts: heads that retrieve, those of the first layer among them, see `heads_of`.
        budgets: of those arms.
        others: specs, as `Study.policies` reads them.
        lengths, texts, asked, seed: see `Questions`.
        choice: what stands for HardKuma.
    """

    file: str
    counts: tuple[int | str, ...]
    budgets: tuple[int, ...]
    others: tuple[str, ...] = ()
    lengths: tuple[int, int] = (4096, 4096)
    texts: int = 24
    asked: int = 12
    seed: int = 20
    choice: Choice = CHOICE

    def units(self, study: Study) -> int:
        return self._questions(self._arms(study)).units(study)

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        """See `Questions`.

        Raises:
            SaccadeError: the file is not there, nothing was asked under its roles, or `choice` is not about them.
        """
        arms, chosen = self._arms(study), self.choice.chosen(trial_of(self.file, study, self.choice))
        found: dict[str, list[Sample]] = {}
        for sample in self._questions(arms).run(study, advance):
            found.setdefault(sample.arm, []).append(sample)
        some = next(iter(found.values()))
        return [
            as_chosen(sample, arm, chosen) if arm.startswith(CHOSEN) else replace(sample, arm=arm)
            for arm, spec in arms.items()
            for sample in (found[spec] if spec else some)
        ]

    def conditions(self, study: Study) -> dict[str, Any]:
        conditions = self._questions(self._arms(study)).conditions(study)
        trial = file_conditions(self.file, study, self.choice)
        return {**conditions, **{name: trial[name] for name in ("file", "sha256", "measured_by")}}

    def _questions(self, arms: dict[str, str]) -> Questions:
        specs = tuple(dict.fromkeys(filter(None, arms.values())))
        return Questions(specs, lengths=self.lengths, texts=self.texts, asked=self.asked, seed=self.seed)

    def _arms(self, study: Study) -> dict[str, str]:
        """Specs by arm; "" of gates that do not stand."""
        return {**dict(self._gated(study)), **{spec: spec for spec in self.others}}

    def _gated(self, study: Study) -> Iterator[tuple[str, str]]:
        trial, shape = trial_of(self.file, study, self.choice), study.subject.shape
        chosen, direct = self.choice.chosen(trial), direct_of(trial)
        for name, variant in ((CHOSEN, chosen), (LETTER, LETTER), (DIRECT, direct)):
            for run in trial["runs"]:
                for count in self.counts if run["variant"] == (variant or direct) else ():
                    told = cut(run["values"], heads_of(count, len(shape.full_layers), shape.kv_heads), shape)
                    for budget in self.budgets:
                        spec = f"lychee_decode:budget={budget},roles={told}" if variant else ""
                        yield f"{name} {count}, seed {run['seed']}, budget {budget}", spec


def cut(values: Sequence[Sequence[float]], count: int, shape: ModelShape) -> str:
    """Roles as a `heads:` list: the first layer's heads, and so many others that all are `count`, the best ones.

    Raises:
        SaccadeError: fewer than the first layer has, or more than there are.
    """
    above = count - shape.kv_heads
    if not 0 <= above <= sum(map(len, values)):
        raise SaccadeError(
            f"{count} heads that retrieve are not valid: the model has {shape.kv_heads} in its first layer"
        )
    return head_list(best_heads(numpy.array(values), above), shape)
