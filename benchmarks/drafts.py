"""Drafts that vLLM accepts of a model with real weights, by kind of text, and what tokens per second come of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy
from rich.table import Table

from claims.designs.kinds import texts_by_kind
from claims.judging.shares import share_interval
from saccade.adapters.vllm.lossless import ADAPTIVE, WORKER, speculation
from saccade.adapters.vllm.options import KEY, ServeOptions
from saccade.bench.synthetic import prepare_process
from saccade.bench.variants import STOCK
from saccade.errors import DocumentError
from saccade.eval.output import whole_numbers
from saccade.eval.subject import Subject
from saccade.methods.policy import Policy
from saccade.recipes.machine import environment
from saccade.report.table import fill, new_table
from saccade.report.wording import Columns, number

AGAIN, MIXED = f"{STOCK} (last)", "mixed"
LONGER = 3
"""Answers whose pace is taken are so many times as long; their first part is left out, in which lengths are tried."""

COLUMNS: Columns = {
    "engine": lambda row: row["engine"],
    "texts": lambda row: f"{row['texts']} × {row['kind']}",
    "T": lambda row: f"{row['temperature']:g}",
    "accepted": lambda row: number(row["accepted"], "{:.3f}"),
    "95%": lambda row: "–" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"]),
    "tokens per step": lambda row: number(row["gained"], "{:.2f}"),
    "as stock": lambda row: number(row["as_stock"], "{}"),
    "tokens per second": lambda row: number(row["pace"], "{:.0f}"),
}


@dataclass(frozen=True, slots=True)
class DraftsSettings:
    """What the user can choose; see `python -m benchmarks drafts --help`."""

    model: str
    policy: str
    budgets: str
    drafts: int
    context: int
    texts: int
    new_tokens: int
    batches: str
    seed: int


@dataclass
class Drafts:
    """Settings that passed every check; `engines` are told options and whether the number of drafts is fixed."""

    settings: DraftsSettings
    subject: Subject
    batches: tuple[int, ...]
    engines: Mapping[str, tuple[ServeOptions | None, bool]]
    longest: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    _stock: dict[str, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def check(cls, settings: DraftsSettings) -> Drafts:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        subject = Subject.check(settings.model, "auto", "auto")
        engines: dict[str, tuple[ServeOptions | None, bool]] = {STOCK: (None, False)}
        given = settings.policy + ("," if ":" in settings.policy else ":")
        for place, budget in enumerate(whole_numbers("budget", settings.budgets, at_least=16)):
            policy = Policy.from_spec(f"{given}budget={budget},rectify={settings.drafts}:verify")
            policy.plan(subject.shape)
            engines |= {} if place else {str(policy): (ServeOptions(policy), False)}
            engines[f"{policy}, always"] = ServeOptions(policy), True
        batches = whole_numbers("batch", settings.batches, at_least=1)
        longest = settings.context + LONGER * settings.new_tokens + settings.drafts + 1
        if longest > subject.positions:
            raise DocumentError(f"{longest} tokens, context and new ones: the model has {subject.positions} positions")
        return cls(settings, subject, batches, {**engines, AGAIN: (None, False)}, longest)

    @property
    def units(self) -> int:
        return len(self.engines)

    def run(self, advance: Callable[[str], None]) -> None:
        """Ask every engine the same, one engine after the other."""
        prepare_process(served=True)
        own, subject = self.settings, self.subject
        prompts = texts_by_kind(subject.tokenizer, own.context, own.texts, own.seed, subject.positions)
        mixed = [text for turn in zip(*prompts.values(), strict=True) for text in turn]
        for name in self.engines:
            llm = self._engine(name)
            try:
                for kind, texts in prompts.items():
                    self.rows += [self._ask(llm, name, kind, texts, temperature) for temperature in (0.0, 0.7)]
                for batch in self.batches:
                    self.rows.append(self._ask(llm, name, MIXED, [mixed[row % len(mixed)] for row in range(batch)], 0))
            finally:
                llm.llm_engine.engine_core.shutdown()
            advance(name)

    def results(self) -> dict[str, Any]:
        about = environment(threads=1, dtype=self.subject.dtype, device=self.subject.device)
        told = {"settings": asdict(self.settings), "environment": about}
        return {"shape": self.subject.source.name, "rows": self.rows, **told}

    def _engine(self, name: str) -> Any:
        import vllm

        own, (options, fixed), ours = self.settings, self.engines[name], dict[str, Any]()
        if options is not None:
            ours = {"worker_cls": WORKER, "speculative_config": speculation(own.model, options.drafts, fixed=fixed)}
            ours |= {"additional_config": {KEY: options.to_dict()}, "attention_backend": "CUSTOM"}
            ours |= {} if fixed else {"scheduler_cls": ADAPTIVE}
        return vllm.LLM(
            model=own.model, dtype=self.subject.dtype_name, seed=own.seed, max_num_batched_tokens=8192,
            max_model_len=self.longest, max_num_seqs=-(-max(*self.batches, own.texts) // 4) * 4, **ours,
        )  # fmt: skip

    def _ask(self, llm: Any, name: str, kind: str, texts: Sequence[list[int]], temperature: float) -> dict[str, Any]:
        """Answer texts together: what rows gain in a step, and the pace while all decode."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        own, inner, paced = self.settings, llm.llm_engine, kind == MIXED
        most = own.new_tokens * (LONGER if paced else 1)
        params = SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=paced, detokenize=False)
        for row, text in enumerate(texts):
            inner.add_request(f"{name}-{kind}-{temperature}-{row}", TokensPrompt(prompt_token_ids=text), params)
        answers, gains, marks = [list[int]() for _ in texts], [list[int]() for _ in texts], list[tuple[int, float]]()
        while inner.has_unfinished_requests():
            for output in inner.step():
                row, tokens = int(output.request_id.rsplit("-", 1)[1]), [*output.outputs[0].token_ids]
                gains[row].append(len(tokens) - len(answers[row]))
                answers[row] = tokens
            lengths = [*map(len, answers)]
            if min(lengths) >= own.new_tokens and max(lengths) < most:
                marks.append((sum(lengths), time.perf_counter()))
        # A prompt's step has no drafts; the last one may be cut where an answer ends.
        cycles = [numpy.array(gained[1:-1], dtype=int) for gained in gains if len(gained) > 2]
        every, found = numpy.array([*chain(*cycles)]), {"engine": name, "kind": kind, "temperature": temperature}
        gained = every.mean() if cycles else None
        found |= {"texts": len(cycles), "gained": gained, "accepted": None, "interval": None, "pace": None}
        if cycles and self.engines[name][1]:
            accepted, drafted = [int((one - 1).sum()) for one in cycles], [own.drafts * len(one) for one in cycles]
            found |= {"accepted": sum(accepted) / sum(drafted), "interval": share_interval(accepted, drafted)}
            found["by_position"] = [(every > place).mean() for place in range(1, own.drafts + 1)]
        if paced and len(marks) > 1:
            found["pace"] = numpy.divide(*numpy.subtract(marks[-1], marks[0]))  # tokens over seconds
        known = None if paced or temperature else self._stock.setdefault(kind, answers)
        return {**found, "as_stock": known and sum(map(list.__eq__, known, answers))}


def drafts_table(results: Mapping[str, Any]) -> Table:
    """A section per engine, a row per load."""
    table = new_table(f"{results['shape']}, {results['environment']['device']}", COLUMNS, ("engine", "texts"))
    return fill(table, results["rows"], COLUMNS, "engine")
