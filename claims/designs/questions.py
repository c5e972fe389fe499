"""Facts hidden in long texts: every arm is asked the same questions, its answers and both recalls are the samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from saccade.calibrate.sweep import KEY, Sweep
from saccade.decode.recall import MeanRecall

from ..judging.claim import Sample
from ..judging.study import Study
from .packages import PackageProblems
from .texts import OfQuestions


@dataclass(frozen=True, slots=True)
class Questions(OfQuestions):
    """Stretches of packages' sources that share no token, read densely once; each question is decoded under every arm.

    Measures: `right`, the share of a text's questions; `attention` and `token`, both recalls over heads with a set;
    `share` of the cache that a head attends to.

    Attributes:
        arms: specs, as `Study.policies` reads them.
        task: how facts are stated; see `saccade tune --task`.
        lengths: shortest and longest text in tokens.
        texts, asked: how many, and questions about each.
        recall: measure both recalls too, which takes as long again.
        seed: where everything random comes from.
    """

    arms: tuple[str, ...]
    task: str = "kv"
    lengths: tuple[int, int] = (4096, 4096)
    texts: int = 16
    asked: int = 12
    recall: bool = False
    seed: int = 20

    def units(self, study: Study) -> int:
        return len(study.policies(self.arms)) * self.texts

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        policies, subject = study.policies(self.arms), study.subject
        problems = PackageProblems(
            subject.tokenizer, self.task, self.lengths, self.texts, self.asked, self.seed, subject.positions
        )
        about = {name: getattr(self, name) for name in ("task", "texts", "asked", "recall", "seed")}
        about["lengths"] = list(self.lengths)
        with study.samples(about, KEY) as ledger:
            sweep = Sweep(study.loaded, subject.tokenizer, problems, ledger, study.threads, self.recall)
            sweep.run([*dict.fromkeys(map(str, policies.values()))], advance)
            return [
                _sample(arm, ledger.records[number, str(policy)])
                for arm, policy in policies.items()
                for number in sweep.numbers
            ]

    def conditions(self, study: Study) -> dict[str, Any]:
        """Machine, versions and model; and what arms ran as, where the model's recipe gave layers or roles."""
        ran = {arm: str(policy) for arm, policy in study.policies(self.arms).items() if str(policy) != arm}
        return OfQuestions.conditions(self, study) | ({"arms": ran} if ran else {})


def _sample(arm: str, record: dict[str, Any]) -> Sample:
    values = {"right": fmean(record["right"]), "share": record["share"]}
    recalls = MeanRecall.of_parts([layer and MeanRecall(*layer) for layer in record["recalls"]])
    if recalls is not None and recalls.attention is not None and recalls.token is not None:
        values |= {"attention": recalls.attention, "token": recalls.token}
    return Sample(str(record["problem"]), arm, values)
