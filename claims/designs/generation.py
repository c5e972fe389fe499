"""Answers that a model goes on with until it ends them itself: how many tokens that takes under every arm."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from saccade.adapters.hf.run import sparsify
from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.sweep import KEY
from saccade.eval.reader import Reader
from saccade.eval.workers import on_threads
from saccade.methods.policy import Policy

from ..judging.claim import Sample, Values
from ..judging.study import Study
from .packages import PackageProblems
from .texts import OfQuestions


@dataclass(frozen=True, slots=True)
class Generation(OfQuestions):
    """Stretches of packages' sources that share no token, read densely once; answers are decoded greedily, one by one.

    Measures, each a mean over a text's questions: `tokens` until the end-of-sequence token, which counts, or `longest`;
    `ended`, the share that came to it; `answer`, tokens until the first full stop or new line behind a word, as
    `saccade compare` ends answers; `right`, the share that begin with the right answer.

    Attributes:
        arms: specs, as `Study.policies` reads them; none that drafts.
        task, texts, asked, seed: see `Questions`.
        length, longest: tokens of a text, and of an answer at most.
    """

    arms: tuple[str, ...]
    task: str = "kv"
    length: int = 2048
    texts: int = 12
    asked: int = 4
    longest: int = 64
    seed: int = 20

    def units(self, study: Study) -> int:
        return len(study.policies(self.arms)) * self.texts

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        policies, subject = study.policies(self.arms), study.subject
        lengths, room = (self.length, self.length), subject.positions - self.longest
        problems = PackageProblems(subject.tokenizer, self.task, lengths, self.texts, self.asked, self.seed, room)
        about = {name: getattr(self, name) for name in ("task", "length", "texts", "asked", "longest", "seed")}
        numbers = range(len(problems))
        with study.samples(about, KEY) as ledger, on_threads(study.threads):
            for number in numbers:
                missing = [one for one in policies.values() if (number, str(one)) not in ledger.records]
                for policy, values in self._read(study, problems[number], missing):
                    ledger.add({"problem": number, "spec": str(policy), "values": values})
                    advance(str(policy))
            return [
                Sample(str(number), arm, ledger.records[number, str(policy)]["values"])
                for arm, policy in policies.items()
                for number in numbers
            ]

    def _read(self, study: Study, problem: Problem, policies: Sequence[Policy]) -> Iterator[tuple[Policy, Values]]:
        reader = Reader(study.loaded, problem.tokens) if policies else None
        for policy in dict.fromkeys(policies):
            assert reader is not None
            values = [self._answer(study, reader, ask, policy) for ask in problem.asks]
            yield policy, {name: fmean(one[name] for one in values) for name in values[0]}

    def _answer(self, study: Study, reader: Reader, ask: Ask, policy: Policy) -> Values:
        tokenizer, said = study.subject.tokenizer, list[int]()
        end = tokenizer.eos_token_id
        with sparsify(study.loaded, policy, tokenizer=tokenizer) as run, run.decoding():
            try:
                logits = reader.feed(ask.prompt, policy.phase)
                while len(said) < self.longest:
                    said.append(int(logits.argmax()))
                    if said[-1] == end:
                        break
                    logits = reader.feed(said[-1:])
            finally:
                reader.crop()
        texts = (str(tokenizer.decode(said[: count + 1])) for count in range(len(said)))
        stops = (count for count, text in enumerate(texts, start=1) if "." in text or "\n" in text.lstrip())
        return {
            "tokens": len(said),
            "ended": float(said[-1] == end),
            "answer": min(next(stops, len(said)), len(said)),
            "right": float(tuple(said[: len(ask.answer)]) == ask.answer),
        }
