"""The main job: the same questions about the same contexts under every policy, first for quality, then for time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from statistics import median
from typing import Any

from ..adapters.hf.probe import Passage
from ..adapters.hf.run import sparsify
from ..checkpoints.shape import shape_of
from ..decode.stats import RunStats
from ..methods.policy import Policy
from .context import Context, Question
from .divergence import probed
from .entry import terms_of
from .gaze import GazeObserver
from .output import GAZE, RECALL, SAMPLES, ResultsFolder
from .reader import NEVER, Reader, rows_that_fit
from .sheet import AnswerRecall, Row, RowCounter, Sheet
from .tally import LayerRecalls, Tally, recalls_of
from .tokens import TokenizedText
from .workers import on_threads, shared_out, workers_for

TIMED_QUESTIONS = 1
"""Questions per context that the timing pass decodes under every policy in turn."""

WARM_STEPS = 2
"""First steps of a timed question that are not counted: they build indexes and warm caches."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one question under one policy.

    Attributes:
        said: the text that was decoded.
        tokens: how many tokens that took, the one that ends it among them.
        fact_held: share of the sets that held a token of the fact's value, and
        bins: of each part of the document; None if every layer attended to everything.
        recalls: of every answer token.
    """

    question: Question
    said: str
    tokens: int
    fact_held: float | None
    bins: list[float] | None
    recalls: list[LayerRecalls]


@dataclass
class Comparison:
    """One comparison; `run` it, then read `rows`, which are also right in the middle of it.

    Attributes:
        model, tokenizer: loaded, in eval mode.
        contexts: what is read and asked.
        policies: what is compared; the first one is the dense baseline.
        folder: where answers are written as they come.
        threads: CPU threads of decoding; prefill keeps torch's own number.
        probe: whether each text's own last tokens are told too, for key tokens' divergence from dense attention.
        notes: what the user should know of a run, each once.
    """

    model: Any
    tokenizer: Any
    contexts: Sequence[Context]
    policies: Sequence[Policy]
    folder: ResultsFolder
    threads: int = 1
    probe: bool = False
    tallies: list[Tally] = field(init=False)
    notes: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.tallies = [Tally(policy) for policy in self.policies]

    @property
    def units(self) -> int:
        """Units of work of a whole run: a prefill, an answer or a timed question each."""
        asked = sum(len(context.questions) for context in self.contexts)
        timed = sum(min(len(context.questions), TIMED_QUESTIONS) for context in self.contexts)
        probed = len(self.contexts) * self.probe
        return len(self.contexts) + (asked + timed + probed) * len(self.policies)

    def run(self, advance: Callable[[str], None]) -> None:
        """Read every context, ask under every policy, then time; `advance` is given the name of every unit of work.

        Interrupt it at will: `rows` tell what is done.
        """
        for number, context in enumerate(self.contexts):
            reader = Reader(self.model, context.tokens)
            with on_threads(self.threads) as cores:
                advance(f"context {number + 1} of {len(self.contexts)}")
                self._quality(reader, number, context, cores, advance)
                self._time(reader, context, advance)
            del reader  # whose cache would lie beside the probe's
            if self.probe:
                self._probe(context, advance)

    def rows(self) -> list[dict[str, Any]]:
        """One row per policy, as `results.json` holds them."""
        dense = self.tallies[0].seconds
        baseline = median(dense) if dense else None
        shape, longest = shape_of(self.model.config), max(len(context.tokens) for context in self.contexts)
        return [tally.row(baseline) | terms_of(tally.policy, shape, longest) for tally in self.tallies]

    def _quality(
        self, reader: Reader, number: int, context: Context, cores: int, advance: Callable[[str], None]
    ) -> None:
        """The quality pass over one context; nothing is timed, so policies are shared out among idle cores."""
        tokens, asked = len(context.tokens), len(context.questions)
        longest = max((len(one.tokens) + one.longest for one in context.questions), default=0)
        fitting = rows_that_fit(self.model, tokens, longest, len(self.tallies))
        workers = workers_for(fitting, cores=cores, threads=self.threads, device=self.model.device.type)
        rows = rows_that_fit(self.model, tokens, longest, asked, workers)
        if rows < asked and not self.notes:
            told = f"memory is short of {asked} copies of a text of {tokens:,} tokens"
            self.notes.append(f"{told}: {rows} of its questions are decoded together")
        if workers == 1:
            for tally in self.tallies:
                self._take(number, tally, self._ask(reader, context, tally.policy, rows, tally.add_run), advance)
            return

        def ask_all(place: int) -> tuple[list[Answer], list[RunStats]]:
            runs: list[RunStats] = []
            return list(self._ask(reader, context, self.policies[place], rows, runs.append)), runs

        for tally, (answers, runs) in zip(self.tallies, shared_out(ask_all, len(self.tallies), workers), strict=True):
            for run in runs:
                tally.add_run(run)
            self._take(number, tally, answers, advance)

    def _take(self, number: int, tally: Tally, answers: Iterable[Answer], advance: Callable[[str], None]) -> None:
        for answer in answers:
            question, depth, correct = answer.question, answer.question.depth, answer.question.score(answer.said)
            tally.add_answer(correct, answer.tokens, answer.fact_held, answer.recalls)
            policy = {"policy": tally.policy.name, "budget": tally.policy.budget, "spec": str(tally.policy)}
            place = {**policy, "context": number, "question": question.asked}
            said = {"expected": question.expected, "answer": answer.said, "tokens": answer.tokens, "correct": correct}
            said["depth"] = None if depth is None else round(depth, 4)
            self.folder.add(SAMPLES, {**place, **said, "fact_held": answer.fact_held})
            for step, recalls in enumerate(answer.recalls):
                rounded = [layer and [value and round(value, 4) for value in layer] for layer in recalls]
                attention, token = ([layer and layer[measure] for layer in rounded] for measure in (0, 1))
                told = {"step": step, "attention_recall": attention, "token_recall": token}
                self.folder.add(RECALL, {**place, **told})
            if answer.bins is not None:
                seen = {"depth": depth, "correct": correct, "fact_held": answer.fact_held, "bins": answer.bins}
                self.folder.add(GAZE, {**policy, "context": number, **seen})
            advance(str(tally.policy))

    def _ask(
        self, reader: Reader, context: Context, policy: Policy, rows: int, add_run: Callable[[RunStats], None]
    ) -> Iterator[Answer]:
        """Put the questions about a context under one policy, so many together; statistics come last, in any case.

        Where two tokens are equally likely within rounding, as in bfloat16, answers depend on how many those are.
        """
        questions, past, shape = context.questions, len(context.tokens), shape_of(self.model.config)
        counter, gaze, recall = observers = RowCounter(shape), GazeObserver(), AnswerRecall(shape.full_layers)
        # Equal beginnings of the questions are decoded once: the same tokens, the same sets, the same KV. Not so where
        # they may have been rectified, with the first questions, before others begin.
        shared = _shared_beginning(questions) if policy.rectify is None else 0
        # Given tokens are no drafts: nothing verifies them. And drafts of one row would stand or fall with others'.
        verified = policy.rectify is not None and policy.rectify.mode == "verify"
        phase, rows = (NEVER, 1) if verified else (policy.phase, rows)
        with sparsify(self.model, policy, tokenizer=self.tokenizer, observers=observers) as run, run.decoding():
            try:
                if shared:
                    counter.turn_to(_sheet(questions[:1], 1, past))
                    reader.feed(questions[0].tokens[:shared])
                elif rows > 1:
                    # So that an index of the text is built once, for one row.
                    reader.feed(questions[0].tokens[:1])
                    reader.crop()
                reader.repeat(rows)
                for begin in range(0, len(questions), rows):
                    asked = questions[begin : begin + rows]
                    sheet = _sheet(asked, rows, past)
                    for observer in observers:
                        observer.turn_to(sheet)
                    hear = [partial(question.heard, self.tokenizer) for question in asked]
                    for place, said in reader.answers(sheet, hear, phase):
                        counter.stats(run.stats())
                        row, held, bins = sheet.rows[place], gaze.fact_held(place), gaze.bins(place)
                        recalls = recalls_of(recall.records(row), shape.full_layers)
                        yield Answer(asked[place], said, len(row.said), held, bins, recalls)
                    reader.crop(shared)
            finally:
                reader.crop()
                reader.repeat(1)
                add_run(counter.stats(run.stats()))

    def _time(self, reader: Reader, context: Context, advance: Callable[[str], None]) -> None:
        """The timing pass: no observers, the same tokens for all, policies taking turns."""
        turns = list(self.tallies)
        for question in context.questions[:TIMED_QUESTIONS]:
            value = self.tokenizer(f" {question.expected}.", add_special_tokens=False)["input_ids"]
            for tally in turns:
                try:
                    self._time_one(reader, [*question.tokens, *value[: question.longest]], tally)
                finally:
                    reader.crop()
                advance(f"timing {tally.policy}")
            # Whoever was first is last next time, so that a drift of the machine's speed falls on all alike.
            turns.reverse()

    def _time_one(self, reader: Reader, tokens: Sequence[int], tally: Tally) -> None:
        """Time the decoding of given tokens, dense passes over earlier steps apart; of drafts nothing."""
        policy, phase = tally.policy, tally.policy.phase
        if policy.rectify is not None and policy.rectify.mode == "verify":
            return
        with sparsify(self.model, policy, tokenizer=self.tokenizer) as run, run.decoding():
            for number, seconds in enumerate(reader.timed(tokens)):
                if phase.dense_at(number):
                    tally.pass_seconds.append(seconds)
                elif number >= WARM_STEPS:
                    tally.seconds.append(seconds)
            # The question is shorter than a round: what is missing is decoded, so that its dense pass is timed too.
            missing = phase.period - 1 - len(tokens)
            if 0 <= missing < reader.room:
                if missing:
                    reader.feed((list(tokens) * missing)[:missing], phase)
                tally.pass_seconds += reader.timed(tokens[:1])

    def _probe(self, context: Context, advance: Callable[[str], None]) -> None:
        """Kept once every policy was told the text: rows are compared."""
        passage, found = Passage(context.tokens, TokenizedText.of(self.tokenizer, "").start), list[dict[str, Any]]()
        for policy, told in zip(self.policies, probed(self.model, self.tokenizer, passage, self.policies), strict=True):
            found.append(told)
            advance(f"probing {policy}")
        for tally, told in zip(self.tallies, found, strict=True):
            tally.told.append(told)


def _sheet(questions: Sequence[Question], rows: int, past: int) -> Sheet:
    return Sheet.of([Row([*one.tokens], len(one.tokens), one.value_span) for one in questions], rows, past)


def _shared_beginning(questions: Sequence[Question]) -> int:
    """How many first tokens all questions share, their last two excepted."""
    if len(questions) < 2:
        return 0
    columns = zip(*(question.tokens[:-2] for question in questions), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
