"""Drafts that vLLM accepts of a model with real weights, by kind of text, and what tokens per second come of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import chain, product
from typing import Any

import numpy
from rich.table import Table
from scipy.stats import bootstrap

from lab.kinds import texts_by_kind
from saccade.adapters.vllm.engine_settings import engine_settings, pass_settings
from saccade.adapters.vllm.lossless import lengths
from saccade.adapters.vllm.options import CAPTURED, ServeOptions
from saccade.adapters.vllm.server.serve import INSTALL
from saccade.bench.grid import OnUnit
from saccade.bench.synthetic import prepare_process
from saccade.bench.variants import STOCK
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.output import whole_numbers
from saccade.eval.subject import Subject
from saccade.methods.policy import Policy
from saccade.recipes.machine import environment
from saccade.report.table import fill, new_table
from saccade.report.wording import Columns, number

AGAIN, PLAIN = f"{STOCK} (last)", "code and prose"
TRIED, LONGER, FEWEST, LOADS = 128, 3, 30, 8
"""Of a pace: tokens left out, in which lengths are tried; times `new_tokens` behind them; fewest steps; fewest rows."""

COLUMNS: Columns = {
    "engine": lambda row: row["engine"],
    "texts": lambda row: f"{row['texts']} × {row['kind']}",
    "together": lambda row: str(row.get("batch", row["texts"])),
    "T": lambda row: f"{row['temperature']:g}",
    "accepted": lambda row: number(row.get("accepted"), "{:.3f}"),
    "95%": lambda row: "{:.3f} to {:.3f}".format(*row["interval"]) if row.get("interval") else "-",
    "tokens per step": lambda row: number(row.get("gained"), "{:.2f}"),
    "as stock": lambda row: number(row.get("as_stock"), "{}"),
    "tokens per second": lambda row: number(row.get("pace"), "{:.0f}"),
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
    rectified: bool = False


@dataclass
class Drafts:
    """Settings that passed every check; an engine is told options and whether the number of drafts is fixed.

    `most` rows stand together: as many at least as vLLM captures lengths.
    """

    settings: DraftsSettings
    subject: Subject
    batches: tuple[int, ...]
    engines: Mapping[str, tuple[ServeOptions | None, bool]]
    longest: int
    most: int
    notes: tuple[str, ...] = ()
    _stock: dict[str, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def check(cls, settings: DraftsSettings) -> Drafts:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        if find_spec("vllm") is None:
            raise SaccadeError(INSTALL)
        subject = Subject.check(settings.model, "auto", "auto")
        engines: dict[str, tuple[ServeOptions | None, bool]] = {STOCK: (None, False)}
        given = settings.policy + ("," if ":" in settings.policy else ":")
        sizes = whole_numbers("budget", settings.budgets, at_least=1) if settings.budgets else (None,)
        for place, budget in enumerate(sizes):
            of_budget = given + (f"budget={budget}," if budget else "") + f"rectify={settings.drafts}"
            policy = Policy.from_spec(f"{of_budget}:verify")
            policy.plan(subject.shape)
            if settings.rectified:
                rectified = Policy.from_spec(of_budget)
                engines[str(rectified)] = ServeOptions(rectified), False
            elif not place:
                engines[str(policy)] = ServeOptions(policy), False
            engines[f"{policy}, always"] = ServeOptions(policy), True
        batches = whole_numbers("batch", settings.batches, at_least=1)
        if max(batches) > 2 * settings.texts:
            raise SaccadeError(f"batch {max(batches)} is not valid: at most {2 * settings.texts}, of code and prose")
        most = max(*batches, settings.texts, len(lengths(settings.drafts)))
        if most * (settings.drafts + 1) > CAPTURED:
            raise SaccadeError(f"{most} rows of {settings.drafts} drafts: no graphs beyond {CAPTURED} tokens a pass")
        longest = settings.context + TRIED + LONGER * settings.new_tokens + settings.drafts + 1
        if longest > subject.positions:
            raise DocumentError(f"{longest} tokens, context and new ones: the model has {subject.positions} positions")
        return cls(settings, subject, batches, {**engines, AGAIN: (None, False)}, longest, most)

    @property
    def units(self) -> int:
        return len(self.engines)

    def run(self, on_unit: OnUnit) -> dict[str, Any]:
        """Ask every engine the same, one engine after the other."""
        prepare_process(served=True)
        own, subject, rows = self.settings, self.subject, list[dict[str, Any]]()
        about = environment(threads=1, dtype=subject.dtype, device=subject.device) | {"model": subject.source.name}
        results = {"shape": subject.source.name, "rows": rows, "settings": asdict(own), "environment": about}
        prompts = texts_by_kind(subject.tokenizer, own.context, own.texts, own.seed, subject.positions)
        plain = [text for pair in zip(prompts["code"], prompts["prose"], strict=True) for text in pair]
        for name in self.engines:
            llm = self._engine(name)
            try:
                # A row that waited, or was preempted, would have steps without drafts.
                cache, needed = llm.llm_engine.vllm_config.cache_config, self.most * self.longest
                if (room := cache.num_gpu_blocks * cache.block_size) < needed:
                    raise SaccadeError(f"{self.most} rows of {self.longest} tokens: the cache has {room}, not {needed}")
                for (kind, texts), temperature in product(prompts.items(), (0.0, 0.7)):
                    rows.append(self._count(llm, name, kind, texts, temperature))
                rows += [self._pace(llm, name, batch, plain) for batch in self.batches]
            finally:
                llm.llm_engine.engine_core.shutdown()
            on_unit(name, results)
        return results

    def _engine(self, name: str) -> Any:
        import vllm

        own, (options, fixed), ours = self.settings, self.engines[name], dict[str, Any]()
        told: dict[str, Any] = {"model": own.model, "dtype": self.subject.dtype_name, "seed": own.seed}
        told |= {"max_num_batched_tokens": 8192, "max_model_len": self.longest, "max_num_seqs": -(-self.most // 4) * 4}
        if options is not None:
            ours = engine_settings(options, own.model, fixed=fixed)
            if options.rewrites is not None:
                ours |= pass_settings(vllm.EngineArgs(**told, **ours).create_engine_config(), options.rewrites)
        return vllm.LLM(**told, **ours)

    def _count(self, llm: Any, name: str, kind: str, texts: Sequence[list[int]], temperature: float) -> dict[str, Any]:
        """What rows gain in each step that begins within an answer's first `new_tokens`; which answers are stock's."""
        own, most = self.settings, self.settings.new_tokens + self.settings.drafts
        answers, steps = [list[int]() for _ in texts], [list[tuple[int, int]]() for _ in texts]
        for now, _ in _answers(llm, texts, most, temperature):
            for taken, before, after in zip(steps, answers, now, strict=True):
                taken += [(len(before), len(after))] if len(after) > len(before) else []
            answers = now
        # A prompt's step has no drafts; the last one is cut where an answer ends by itself.
        pairs = zip(steps, [len(one) if len(one) < most else None for one in answers], strict=True)
        gains = [[b - a for a, b in one if 0 < a < own.new_tokens and b != end] for one, end in pairs]
        cycles = [one for one in gains if one]
        row: dict[str, Any] = {"engine": name, "kind": kind, "temperature": temperature, "texts": len(texts)}
        every = numpy.array([*chain(*cycles)])
        row["gained"] = float(every.mean()) if cycles else None
        if cycles and self.engines[name][1]:
            accepted, drafted = [sum(one) - len(one) for one in cycles], [own.drafts * len(one) for one in cycles]
            row |= {"accepted": sum(accepted) / sum(drafted), "interval": share_interval(accepted, drafted)}
            row["by_position"] = [float((every > place).mean()) for place in range(1, own.drafts + 1)]
        answers = [answer[: own.new_tokens] for answer in answers]
        if not temperature:
            row["as_stock"] = sum(map(list.__eq__, self._stock.setdefault(kind, answers), answers))
        return row

    def _pace(self, llm: Any, name: str, batch: int, texts: Sequence[list[int]]) -> dict[str, Any]:
        """Tokens per second of a batch while all its rows decode, until one has ended; `each`, of every such batch, is
        its tokens, seconds and steps."""
        most, each = TRIED + LONGER * self.settings.new_tokens, list[tuple[int, float, int]]()
        most_texts = len(texts) if self.settings.rectified else min(LOADS, len(texts))
        taken = max(batch, most_texts // batch * batch)
        for start in range(0, taken, batch):
            marks = list[tuple[int, float]]()
            for answers, ended in _answers(llm, texts[start : start + batch], most, 0.0):
                if min(map(len, answers)) >= TRIED and not ended:
                    marks.append((sum(map(len, answers)), time.perf_counter()))
            first, last = (marks[0], marks[-1]) if marks else ((0, 0.0), (0, 0.0))
            each.append((last[0] - first[0], last[1] - first[1], max(len(marks) - 1, 0)))
        tokens, seconds, steps = map(sum, zip(*each, strict=True))
        row = {"engine": name, "kind": PLAIN, "temperature": 0.0, "texts": taken, "batch": batch, "each": each}
        return {**row, "steps": steps, "pace": tokens / seconds if steps >= FEWEST else None}


def _answers(llm: Any, texts: Sequence[list[int]], most: int, temperature: float) -> Iterator[tuple[list[Any], int]]:
    """The tokens of answers to texts that are asked together, step by step, and how many have ended."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    inner, answers, ended = llm.llm_engine, [list[int]() for _ in texts], 0
    params = SamplingParams(temperature=temperature, max_tokens=most, detokenize=False)
    for row, text in enumerate(texts):
        inner.add_request(str(row), TokensPrompt(prompt_token_ids=text), params)
    while inner.has_unfinished_requests():
        for output in inner.step():
            answers[int(output.request_id)] = [*output.outputs[0].token_ids]
            ended += output.finished
        yield list(answers), ended


def share_interval(some: Sequence[int], of: Sequence[int]) -> tuple[float, float] | None:
    """95% of `sum(some) / sum(of)` by resampling texts (percentile bootstrap); None of fewer than three."""
    if len(some) < 3:
        return None

    def share(some: Any, of: Any, axis: int = -1) -> Any:
        return some.sum(axis) / of.sum(axis)

    found = bootstrap((some, of), share, paired=True, vectorized=True, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def drafts_table(results: Mapping[str, Any]) -> Table:
    """A section per engine, a row per load."""
    table = new_table(f"{results['shape']}, {results['environment']['device']}", COLUMNS, ("engine", "texts"))
    return fill(table, results["rows"], COLUMNS, "engine")
