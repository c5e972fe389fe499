"""Drafts that vLLM accepts of a model with real weights, by kind of text, and what tokens per second come of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pydoc_data.topics import topics
from typing import Any

import numpy
from rich.table import Table
from scipy.stats import bootstrap

from claims.designs.continuation import stretches
from saccade.adapters.vllm.lossless import ADAPTIVE, WORKER, speculation
from saccade.adapters.vllm.options import KEY, ServeOptions
from saccade.bench.synthetic import prepare_process
from saccade.bench.variants import STOCK
from saccade.errors import DocumentError
from saccade.eval.output import whole_numbers
from saccade.eval.subject import Subject
from saccade.eval.tokens import encode
from saccade.methods.policy import Policy
from saccade.recipes.machine import environment
from saccade.report.table import fill, new_table
from saccade.report.wording import Columns, number

AGAIN = "stock, again"
QUESTION = "Explain in a few paragraphs what this does, and name its weakest part."
LONGER = 3
"""Where a pace is taken answers are so many times as long; their first part is left out, in which lengths are tried."""

COLUMNS: Columns = {
    "engine": lambda row: row["engine"],
    "texts": lambda row: f"{row['texts']} × {row['kind']}",
    "temperature": lambda row: number(row["temperature"], "{:g}"),
    "accepted": lambda row: number(row["accepted"], "{:.3f}"),
    "95%": lambda row: "–" if row["interval"] is None else "{:.3f} to {:.3f}".format(*row["interval"]),
    "tokens per step": lambda row: f"{row['gained']:.2f}",
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
    memory: float
    dtype: str
    seed: int


@dataclass
class Drafts:
    """Settings that passed every check; `run`, then read `results`.

    Attributes:
        engines: by name, what each is told of saccade and whether the number of its drafts is fixed.
        rows: by engine, kind of texts and temperature; or of a batch of all kinds, with its pace.
    """

    settings: DraftsSettings
    subject: Subject
    batches: tuple[int, ...]
    engines: Mapping[str, tuple[ServeOptions | None, bool]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    _stock: dict[str, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def check(cls, settings: DraftsSettings) -> Drafts:
        """Resolve settings; a SaccadeError is one line about the first that is not valid."""
        subject, engines = Subject.check(settings.model, "auto", settings.dtype), dict[str, Any]()
        given = settings.policy + ("," if ":" in settings.policy else ":")
        for budget in whole_numbers("budget", settings.budgets, at_least=16):
            policy = Policy.from_spec(f"{given}budget={budget},rectify={settings.drafts}:verify")
            policy.plan(subject.shape)
            served = {} if engines else {str(policy): (ServeOptions(policy), False)}
            engines |= {**served, f"{policy}, always": (ServeOptions(policy), True)}
        engines = {STOCK: (None, False), **engines, AGAIN: (None, False)}
        job = cls(settings, subject, whole_numbers("batch", settings.batches, at_least=1), engines)
        if job.longest > subject.positions:
            raise DocumentError(f"{job.longest} tokens, context and new: the model has {subject.positions} positions")
        return job

    @property
    def longest(self) -> int:
        """Tokens of a row, drafts included."""
        return self.settings.context + LONGER * self.settings.new_tokens + self.settings.drafts + 1

    @property
    def units(self) -> int:
        """Engines."""
        return len(self.engines)

    def run(self, advance: Callable[[str], None]) -> None:
        """Ask every engine the same, one engine after the other."""
        prepare_process(served=True)
        prompts = self._prompts()
        mixed = [text for turn in zip(*prompts.values(), strict=True) for text in turn]
        for name, (options, fixed) in self.engines.items():
            llm = self._engine(options, fixed=fixed)
            try:
                for kind, texts in prompts.items():
                    self.rows += [self._ask(llm, name, kind, texts, temperature) for temperature in (0.0, 0.7)]
                for batch in self.batches:
                    self.rows.append(self._ask(llm, name, "any", [mixed[row % len(mixed)] for row in range(batch)]))
            finally:
                llm.llm_engine.engine_core.shutdown()
            advance(name)

    def results(self) -> dict[str, Any]:
        """What the JSON file holds."""
        here = environment(threads=1, dtype=self.subject.dtype, device=self.subject.device)
        about = {"settings": asdict(self.settings), "environment": here | {"model": self.subject.source.name}}
        return {"shape": self.subject.source.name, "rows": self.rows, **about}

    def _prompts(self) -> dict[str, list[list[int]]]:
        """As many of each kind: packages' sources, their readmes with Python's reference, questions about sources."""
        own, tokenizer = self.settings, self.subject.tokenizer
        code = [[*t] for t in stretches(tokenizer, own.context, 2 * own.texts, own.seed, self.subject.positions)]
        readmes = dict.fromkeys(one.read_text("METADATA") or "" for one in distributions())
        prose = encode(tokenizer, "\n\n".join([*readmes, *topics.values()]))[: own.texts * own.context]
        found = {"code": code[: own.texts]}
        found["prose"] = [list(prose[start : start + own.context]) for start in range(0, len(prose), own.context)]
        if len(found["prose"]) < own.texts or len(found["prose"][-1]) < own.context:
            raise DocumentError(f"{own.texts} texts of {own.context} tokens: readmes hold {len(prose)} tokens")
        if tokenizer.chat_template is not None:
            asked = [f"{tokenizer.decode(text[: own.context - 128])}\n\n{QUESTION}" for text in code[own.texts :]]
            chats = ([{"role": "user", "content": text}] for text in asked)
            said = (tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats)
            found["chat"] = [[*encode(tokenizer, text)][-own.context :] for text in said]
        return found

    def _engine(self, options: ServeOptions | None, *, fixed: bool) -> Any:
        import vllm

        own, ours = self.settings, dict[str, Any]()
        if options is not None:
            ours = {"worker_cls": WORKER, "speculative_config": speculation(own.model, options.drafts, fixed=fixed)}
            ours |= {"additional_config": {KEY: options.to_dict()}, "attention_backend": "CUSTOM"}
            ours |= {} if fixed else {"scheduler_cls": ADAPTIVE}
        return vllm.LLM(
            model=own.model, dtype=str(self.subject.dtype).removeprefix("torch."), gpu_memory_utilization=own.memory,
            max_model_len=self.longest, max_num_batched_tokens=8192,
            max_num_seqs=-(-max(*self.batches, own.texts) // 4) * 4, disable_log_stats=True, seed=own.seed, **ours,
        )  # fmt: skip

    def _ask(
        self, llm: Any, name: str, kind: str, texts: Sequence[list[int]], temperature: float = 0.0
    ) -> dict[str, Any]:
        """Answer texts together; of each step what a row gained, and the pace while all were decoding."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        own, inner, paced = self.settings, llm.llm_engine, kind == "any"
        most = own.new_tokens * (LONGER if paced else 1)
        params = SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=paced, detokenize=False)
        for row, text in enumerate(texts):
            inner.add_request(f"{name}-{kind}-{temperature}-{row}", TokensPrompt(prompt_token_ids=text), params)
        answers, gains = [list[int]() for _ in texts], [list[int]() for _ in texts]
        begin = end = 0.0
        first = last = 0
        while inner.has_unfinished_requests():
            for output in inner.step():
                row, tokens = int(output.request_id.rsplit("-", 1)[1]), [*output.outputs[0].token_ids]
                gains[row].append(len(tokens) - len(answers[row]))
                answers[row] = tokens
            lengths = [*map(len, answers)]
            if not begin and min(lengths) >= own.new_tokens:
                begin, first = time.perf_counter(), sum(lengths)
            if begin and max(lengths) < most:
                end, last = time.perf_counter(), sum(lengths)
        # A prompt's step has no drafts; the last one may be cut where an answer ends.
        cycles = [gained[1:-1] for gained in gains]
        drafted = numpy.array([own.drafts * len(own_cycles) for own_cycles in cycles])
        accepted = numpy.array([sum(own_cycles) - len(own_cycles) for own_cycles in cycles])
        found: dict[str, Any] = {"engine": name, "kind": kind, "temperature": temperature, "texts": len(texts)}
        found |= {"gained": sum(map(sum, cycles)) / sum(map(len, cycles)), "accepted": None, "interval": None}
        if self.engines[name][1]:
            found |= {"accepted": accepted.sum() / drafted.sum(), "interval": _interval(accepted, drafted)}
            each = [gain for own_cycles in cycles for gain in own_cycles]
            found["by_position"] = [
                sum(gain > place for gain in each) / len(each) for place in range(1, own.drafts + 1)
            ]
        greedy = not (paced or temperature)
        known = self._stock.setdefault(kind, answers) if greedy else answers
        found["as_stock"] = sum(map(list.__eq__, known, answers)) if greedy else None
        found["pace"] = (last - first) / (end - begin) if paced and end > begin else None
        return found


def _interval(accepted: Any, drafted: Any) -> tuple[float, float] | None:
    """95% of the share accepted, by resampling texts; None of fewer than three."""
    if len(accepted) < 3:
        return None

    def share(some: Any, of: Any, axis: int = -1) -> Any:
        return some.sum(axis) / of.sum(axis)

    found = bootstrap((accepted, drafted), share, paired=True, vectorized=True, method="percentile", rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def drafts_table(results: Mapping[str, Any]) -> Table:
    """A row per engine and load."""
    table = new_table(f"{results['shape']}, {results['environment']['device']}", COLUMNS, ("engine", "texts"))
    return fill(table, results["rows"], COLUMNS, "engine")
