"""What a generated token costs rectified, and by self-speculation: sparse drafts, a dense check (ReSA, table 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from claims.designs.packages import stretches
from saccade.adapters.hf.run import Run, sparsify
from saccade.bench.rows import quartiles
from saccade.bench.variants import DENSE, STOCK
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.output import whole_numbers
from saccade.eval.reader import Reader
from saccade.eval.subject import Subject
from saccade.methods.policy import Policy
from saccade.recipes.machine import environment, synchronize
from saccade.report.timings import SETTING, timing_table
from saccade.report.wording import Columns, number

Turn = tuple[float, int, int, int]

COLUMNS: Columns = {
    **SETTING,
    "policy": lambda row: row["policy"],
    "ms per token": lambda row: f"{row['ms_per_token']:.2f}",
    "quartiles": lambda row: f"{row['ms_fast']:.2f} to {row['ms_slow']:.2f}",
    "accepted of a pass": lambda row: number(row["accepted"], "{:.1f}"),
    "over dense": lambda row: number(row["speedup_over_dense"], "{:.2f}×"),
}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """What the user can choose; see `python -m benchmarks speculation --help`."""

    model: str | None
    policy: str
    every: int
    contexts: str
    texts: int
    rounds: int
    periods: int
    threads: int
    dtype: str
    device: str
    seed: int


@dataclass
class Speculation:
    """Settings that passed every check; `run`, then read `results`.

    Attributes:
        variants: stock transformers, dense, the policy rectified and the policy verified, by spec.
        turns: by context, text and variant: of every turn seconds per generated token, passes, drafts, and those that
            stood.
    """

    settings: SpeculationSettings
    subject: Subject
    contexts: tuple[int, ...]
    variants: Mapping[str, Policy | None]
    turns: dict[tuple[int, int, str], list[Turn]] = field(default_factory=dict)

    @classmethod
    def check(cls, settings: SpeculationSettings) -> Speculation:
        """Resolve settings.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        subject = Subject.check(settings.model, settings.device, settings.dtype)
        contexts = whole_numbers("context", settings.contexts, at_least=1)
        if "rectify" in Policy.from_spec(settings.policy).options.model_fields_set:
            raise SaccadeError(f"policy {settings.policy!r} says how it is rectified; --every does")
        given = settings.policy + ("," if ":" in settings.policy else ":")
        both = [Policy.from_spec(f"{given}rectify={settings.every}{mode}") for mode in ("", ":verify")]
        for one in both:
            one.plan(subject.shape)
        # What is generated, and a last draft behind it.
        needed = max(contexts) + (settings.periods + 2) * (settings.every + 1)
        if needed > subject.positions:
            raise DocumentError(f"{needed} tokens, context and generated: the model has {subject.positions} positions")
        return cls(settings, subject, contexts, {STOCK: None, **{str(one): one for one in (DENSE, *both)}})

    @property
    def units(self) -> int:
        """Turns of a variant."""
        return len(self.contexts) * self.settings.texts * self.settings.rounds * len(self.variants)

    def run(self, advance: Callable[[str], None]) -> None:
        """Read every text once and densely, then let the variants go on with it, in turns."""
        subject, own = self.subject, self.settings
        model, threads = subject.load(), torch.get_num_threads()
        torch.set_num_threads(own.threads)
        try:
            for context in self.contexts:
                texts = stretches(subject.tokenizer, context, own.texts, own.seed, subject.positions)
                for number, text in enumerate(texts):
                    reader = Reader(model, text[:-1])
                    for turn in range(own.rounds):
                        # Who was first is last next time: a drift of the machine falls on all alike.
                        for name in list(self.variants)[:: 1 - 2 * (turn % 2)]:
                            found = self._turn(model, reader, text[-1], self.variants[name])
                            self.turns.setdefault((context, number, name), []).append(found)
                            advance(f"{name} behind {context:,} tokens")
        finally:
            torch.set_num_threads(threads)

    def results(self) -> dict[str, Any]:
        """What the JSON file holds: a row per context and variant, and `texts`, the same text by text."""
        device, dtype = self.subject.device, self.subject.dtype
        here = environment(threads=self.settings.threads, dtype=dtype, device=device)
        about = {"settings": asdict(self.settings), "environment": here | {"model": self.subject.source.name}}
        together: dict[tuple[int, str], list[Turn]] = {}
        for (context, _, name), turns in self.turns.items():
            together.setdefault((context, name), []).extend(turns)
        rows = [self._row(context, name, turns) for (context, name), turns in together.items()]
        for row in rows:
            dense = together.get((row["context"], str(DENSE)))
            over = dense and self._row(row["context"], str(DENSE), dense)["ms_per_token"] / row["ms_per_token"]
            # Interrupted before dense had its turn, there is none.
            row["speedup_over_dense"] = over
        texts = [{"text": text, **self._row(at, name, turns)} for (at, text, name), turns in self.turns.items()]
        return {"shape": self.subject.source.name, "rows": rows, "texts": texts, **about}

    def _turn(self, model: Any, reader: Reader, token: int, policy: Policy | None) -> Turn:
        """Seconds per token generated greedily behind a period that builds indexes; passes, drafts, which stood."""
        period, count = self.settings.every + 1, self.settings.periods * (self.settings.every + 1)
        attached: AbstractContextManager[Run | None] = nullcontext()
        if policy is not None:
            attached = sparsify(model, policy, tokenizer=self.subject.tokenizer)
        with attached as run, nullcontext() if run is None else run.decoding():
            try:
                token = self._generate(reader, token, period)
                before = _counted(run)
                synchronize(model.device)
                start = time.perf_counter()
                self._generate(reader, token, count)
                synchronize(model.device)
                seconds = time.perf_counter() - start
            finally:
                reader.crop()
            passes, drafted, accepted = (now - then for now, then in zip(_counted(run), before, strict=True))
        return seconds / count, passes, drafted, accepted

    @staticmethod
    def _generate(reader: Reader, token: int, count: int) -> int:
        """Feed a token and `count - 1` that follow it greedily; the one that comes next."""
        for _ in range(count):
            token = int(reader.feed((token,)).argmax())
        return token

    def _row(self, context: int, name: str, turns: Sequence[Turn]) -> dict[str, Any]:
        fast, median, slow = quartiles([seconds for seconds, *_ in turns])
        passes, drafted, accepted = (sum(turn[place] for turn in turns) for place in (1, 2, 3))
        return {
            "policy": name,
            "runtime": "transformers" if name == STOCK else "saccade",
            "context": context,
            "batch": 1,
            "threads": self.settings.threads,
            "turns": len(turns),
            "ms_per_token": median,
            "ms_fast": fast,
            "ms_slow": slow,
            "passes": passes,
            "accepted": accepted / passes if drafted else None,
        }


def speculation_table(results: Mapping[str, Any]) -> Table:
    """A section per context."""
    return timing_table(results, COLUMNS)


def _counted(run: Run | None) -> tuple[int, int, int]:
    """Dense passes so far, tokens drafted, and those of them that stood."""
    if run is None:
        return 0, 0, 0
    stats = run.stats()
    return stats.dense_passes, stats.drafted, stats.accepted
