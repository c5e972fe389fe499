"""Every problem under every candidate policy, text by text; what is done is in the ledger, whatever ends the run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from ..decode.recall import MeanRecall
from ..eval.interval import wilson
from ..eval.workers import on_threads, shared_out, workers_for
from ..methods.policy import Policy
from .asking import Reading
from .ledger import Ledger
from .problems import Problems

KEY = ("problem", "spec")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate has achieved: as `Reading.ask`, `right` per problem and all else its mean over problems."""

    spec: str
    right: tuple[tuple[bool, ...], ...]
    recalls: tuple[MeanRecall | None, ...]
    share: float

    @property
    def count(self) -> int:
        return sum(map(len, self.right))

    @property
    def correct(self) -> int:
        return sum(map(sum, self.right))

    @property
    def accuracy(self) -> float:
        return self.correct / self.count

    def to_dict(self) -> dict[str, Any]:
        """A row of a results file."""
        return {
            "spec": self.spec,
            "correct": self.correct,
            "n": self.count,
            "accuracy": self.accuracy,
            "interval": wilson(self.correct, self.count),
            **MeanRecall.row(self.recalls),
            "share_attended": self.share,
        }


@dataclass(frozen=True)
class Sweep:
    """Candidates asked problems, by as many workers of so many `threads` as fit; the ledger's key is `KEY`.

    `recall`: measure both recalls too. `rows` questions of a text are decoded together; None: as many as fit. `part` of
    the problems by number; None: all.
    """

    model: Any
    tokenizer: Any
    problems: Problems
    ledger: Ledger
    threads: int = 1
    recall: bool = True
    rows: int | None = None
    part: Sequence[int] | None = None

    @property
    def numbers(self) -> Sequence[int]:
        return range(len(self.problems)) if self.part is None else self.part

    @property
    def most(self) -> int:
        """Texts that processes may read at the same time."""
        return len(self.numbers)

    def run(self, specs: Sequence[str], advance: Callable[[str], None]) -> None:
        """Ask what the ledger does not hold yet, everything about a text at once."""
        done, missing = self.ledger.records, []
        for number in self.numbers:
            unasked = [spec for spec in specs if (number, spec) not in done]
            missing += [(number, unasked)] if unasked else []
        with on_threads(self.threads) as cores:
            count, device = len(missing), self.model.device.type
            workers = workers_for(min(count, self.most), cores=cores, threads=self.threads, device=device)
            asked: Iterable[Iterable[dict[str, Any]]] = (self.ask(*one) for one in missing)
            if workers > 1:
                asked = shared_out(lambda place: [*self.ask(*missing[place])], count, workers)
            for record in chain.from_iterable(asked):
                self.ledger.add(record)
                advance(record["spec"])

    def outcome(self, spec: str) -> Outcome:
        """What a candidate has achieved on all of these problems."""
        records = [self.ledger.records[number, spec] for number in self.numbers]
        measured = ([layer and MeanRecall(*layer) for layer in record.get("recalls", ())] for record in records)
        recalls = tuple(MeanRecall.of_parts(layer) for layer in zip(*measured, strict=True))
        right = tuple(tuple(map(bool, record["right"])) for record in records)
        return Outcome(spec, right, recalls, fmean(record["share"] for record in records))

    def ask(self, number: int, specs: Sequence[str]) -> Iterator[dict[str, Any]]:
        """A text's records, one of each of these candidates; a subclass may ask in another way."""
        reading = Reading(self.model, self.problems[number], self.rows)
        for spec in specs:
            answers = reading.ask(Policy.from_spec(spec), self.tokenizer, recall=self.recall)
            yield {"problem": number, "spec": spec, **answers}
