"""Top-3 accuracy on the last tokens of passages, by which keys and values sparse steps have written (ReSA, 3.2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.methods.policy import Policy

from ..accumulation.accumulation import DECODE_ONLY, DENSE, Accumulation, Case, cases_of
from ..accumulation.passages import Passage, held_out_passages
from ..judging.claim import Sample, Values
from ..judging.study import Study
from .texts import OfTexts
from .together import rows_together

KEY = ("text",)


@dataclass(frozen=True, slots=True)
class Accumulated(OfTexts):
    """The experiment `accumulation`, passage by passage; see docs/experiments.md.

    An arm is `KEPT, SETTING` or `dense`; with more than one length `LENGTH` stands in front. Measures: `right`; `gap`,
    by how much less is right than densely at the same length; `divergence` from dense predictions, in nats; and
    `growth`, by how much more that is than where only dense keys and values lie in front.

    Attributes:
        policy: without what is kept.
        kept: shares of a passage.
        every: sparse steps between dense passes.
        lengths: tokens that are read; all end at the same ones.
        sources: of passages.
        passages: per source.
        sparse_only: also decode them from their first token on.
        seed: where passages begin.
    """

    policy: str
    kept: tuple[float, ...]
    every: tuple[int, ...]
    lengths: tuple[int, ...]
    sources: tuple[str, ...] = ("reference", "library")
    passages: int = 24
    sparse_only: bool = False
    seed: int = 20

    def units(self, study: Study) -> int:
        return len(self.sources) * self.passages

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        cases = [
            case
            for length in self.lengths
            for case in cases_of(
                Policy.from_spec(self.policy), self.kept, self.every, length, sparse_only=self.sparse_only
            )
        ]
        about = {name: getattr(self, name) for name in ("policy", "passages", "seed", "sparse_only")}
        about |= {name: list(getattr(self, name)) for name in ("kept", "every", "lengths", "sources")}
        with study.samples(about, KEY) as ledger:
            passages = [one for one in self._passages(study) if (_name(one),) not in ledger.records]
            rows = rows_together(study.subject.device, max(len(passages), 1), max(self.lengths))
            for first in range(0, len(passages), rows):
                for name, arms in self._read(study, passages[first : first + rows], cases).items():
                    ledger.add({"text": name, "arms": arms})
                    advance(name)
            records = [
                ledger.records[f"{source} {number}",] for source in self.sources for number in range(self.passages)
            ]
        return [sample for record in records for sample in self._samples(record)]

    def conditions(self, study: Study) -> dict[str, Any]:
        return study.environment(f"held out: {', '.join(self.sources)}", self.seed)

    def _passages(self, study: Study) -> list[Passage]:
        return held_out_passages(
            study.subject.tokenizer, self.sources, count=self.passages, shortest=min(self.lengths),
            longest=max(self.lengths), seed=self.seed,
        )  # fmt: skip

    def _read(self, study: Study, passages: Sequence[Passage], cases: Sequence[Case]) -> dict[str, dict[str, Values]]:
        """Every passage's measures, arm by arm."""
        # Passages numbered below `sparse_only` are decoded from their first token on.
        whole = max(passage.number for passage in passages) + 1 if self.sparse_only else 0
        experiment = Accumulation(study.loaded, study.subject.tokenizer, passages, cases, whole, batch=len(passages))
        experiment.run(lambda _: None)
        found: dict[str, dict[str, Values]] = {_name(passage): {} for passage in passages}
        for case, passage, values in experiment.by_passage():
            found[_name(passage)][self._arm(case)] = {name: round(value, 6) for name, value in values.items()}
        return found

    def _arm(self, case: Case) -> str:
        front = f"{case.length}, " if len(self.lengths) > 1 else ""
        return f"{front}{DENSE}" if case.kept is None else f"{front}{case.kept:g}, {case.setting}"

    def _samples(self, record: dict[str, Any]) -> Iterator[Sample]:
        arms: dict[str, Values] = record["arms"]
        for arm, found in arms.items():
            length = f"{arm.partition(', ')[0]}, " if len(self.lengths) > 1 else ""
            values = found | {"gap": arms[f"{length}{DENSE}"]["right"] - found["right"]}
            clean = arms.get(f"{arm.rpartition(', ')[0]}, {DECODE_ONLY}", {})
            if "divergence" in found and "divergence" in clean:
                values["growth"] = found["divergence"] - clean["divergence"]
            yield Sample(record["text"], arm, values)


def _name(passage: Passage) -> str:
    return f"{passage.source} {passage.number}"
