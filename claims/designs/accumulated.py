"""Top-3 accuracy on the last tokens of passages, by which keys and values sparse steps have written (ReSA, 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.methods.policy import Policy

from ..accumulation.accumulation import DENSE, TARGETS, Accumulation, Case, cases_of
from ..accumulation.passages import Passage, held_out_passages
from ..judging.claim import Sample
from ..judging.effects import TEXTS
from ..judging.study import Study

KEY = ("text",)


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The experiment `accumulation`, passage by passage; see docs/claims.md.

    An arm is `KEPT, SETTING` or `dense`; with more than one length `LENGTH` stands in front. Measures: `right`, and
    `gap`, by how much less is right than densely at the same length.

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

    interval: ClassVar[str] = TEXTS

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
            for passage in self._passages(study):
                text = f"{passage.source} {passage.number}"
                if (text,) not in ledger.records:
                    ledger.add({"text": text, "right": dict(self._read(study, passage, cases))})
                    advance(text)
            records = [
                ledger.records[f"{source} {number}",] for source in self.sources for number in range(self.passages)
            ]
        return [sample for record in records for sample in self._samples(record)]

    def conditions(self, study: Study) -> dict[str, Any]:
        return study.environment(f"held out: {', '.join(self.sources)}", self.seed)

    def _passages(self, study: Study) -> list[Passage]:
        return held_out_passages(
            study.subject.tokenizer,
            self.sources,
            count=self.passages,
            shortest=min(self.lengths),
            longest=max(self.lengths),
            seed=self.seed,
        )

    def _read(self, study: Study, passage: Passage, cases: Sequence[Case]) -> Iterator[tuple[str, float]]:
        """Every arm's share of right predictions."""
        # Passages numbered below `sparse_only` are decoded from their first token on.
        whole = passage.number + 1 if self.sparse_only else 0
        experiment = Accumulation(study.loaded, study.subject.tokenizer, [passage], cases, whole, batch=1)
        experiment.run(lambda _: None)
        for row in experiment.rows():
            yield self._arm(row["length"], row["kept"], row["setting"]), row["right"] / TARGETS

    def _arm(self, length: int, kept: float | None, setting: str) -> str:
        front = f"{length}, " if len(self.lengths) > 1 else ""
        return f"{front}{DENSE}" if setting == DENSE else f"{front}{kept:g}, {setting}"

    def _samples(self, record: dict[str, Any]) -> Iterator[Sample]:
        right = record["right"]
        for arm, value in right.items():
            length = f"{arm.partition(', ')[0]}, " if len(self.lengths) > 1 else ""
            yield Sample(record["text"], arm, {"right": value, "gap": right[f"{length}{DENSE}"] - value})
