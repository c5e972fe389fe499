"""A long run of single steps: does memory grow only as it must, do steps stay as fast, do the chosen sets stay put?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import theilslopes
from transformers import DynamicCache

from lab.runner import Runner
from lab.steadiness import Steadiness
from saccade.adapters.hf.run import sparsify
from saccade.adapters.hf.support import refuse_unsupported
from saccade.checkpoints.load import ModelSource, pick_device, pick_dtype
from saccade.errors import DocumentError, SaccadeError
from saccade.eval.document import language_reference
from saccade.methods.policy import Policy
from saccade.recipes.machine import environment, synchronize
from saccade.recipes.resolve import resolve_all

DEFAULT_POLICIES = ("lychee_cluster", "resa")
CONTROL_STEPS = 20
"""Steps of the control, which is the same work after every block: what it drifts, the machine drifts."""

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """What the user can choose; see `python -m benchmarks soak --help`."""

    model: str | None
    policies: tuple[str, ...]
    prompt: int
    tokens: int
    block: int
    window: int
    timed: bool
    sets: bool
    device: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class SoakJob:
    """Settings that passed every check."""

    settings: SoakSettings
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    tokens: tuple[int, ...]
    policies: tuple[Policy, ...]
    notes: tuple[str, ...]

    @classmethod
    def check(cls, settings: SoakSettings) -> SoakJob:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        source = ModelSource.locate(settings.model)
        named, said = resolve_all(settings.policies or DEFAULT_POLICIES, source.location, source.decoder)
        policies = tuple(dict.fromkeys(named))
        for policy in policies:
            if policy.rectify is not None and policy.rectify.mode == "verify":
                raise SaccadeError(f"policy {policy}: a soak feeds given tokens, so there is nothing to verify")
        device = pick_device(settings.device)
        dtype = pick_dtype(settings.dtype, source, device)
        shape, positions = source.shape()
        needed = settings.prompt + settings.tokens
        if needed > positions:
            raise DocumentError(f"{needed} tokens, prompt and decoded: the model has {positions} positions")
        notes = (*said, *(note for policy in policies for note in policy.plan(shape).notes))
        tokenizer = source.tokenizer()
        ids = tokenizer(language_reference(held_out=True), add_special_tokens=False, verbose=False)["input_ids"]
        # A text that is too short begins anew.
        ids = (ids * -(-needed // len(ids)))[:needed]
        return cls(settings, source, device, dtype, tokenizer, tuple(ids), policies, tuple(dict.fromkeys(notes)))

    @property
    def units(self) -> int:
        """Units of work: a block of a policy each, timed and, if asked for, watched."""
        blocks = -(-self.settings.tokens // self.settings.block)
        return blocks * len(self.policies) * (self.settings.timed + self.settings.sets)

    def load_model(self) -> Any:
        """The model, on its device."""
        model = self.source.weights(self.device, self.dtype)
        refuse_unsupported(model)
        return model


class Soak:
    """The runs of all policies over the same tokens; readable at any time through `results`.

    First the timed pass, in which policies take turns block by block and nothing is watched; then, if asked for, the
    same tokens again with an observer of the chosen sets. Every policy has a copy of the model: it stays attached.
    """

    def __init__(self, job: SoakJob) -> None:
        self.job = job
        self._blocks: list[dict[str, Any]] = []
        self._memory: list[dict[str, Any]] = []
        self._steadiness: dict[str, Steadiness] = {}

    @property
    def units(self) -> int:
        return self.job.units

    def run(self, advance: Callable[[str], None]) -> None:
        """Decode everything. Interrupt it at will."""
        settings = self.job.settings
        torch.set_num_threads(settings.threads)
        models = [self.job.load_model() for _ in self.job.policies]
        if settings.timed:
            self._time(models, advance)
        if settings.sets:
            for policy, model in zip(self.job.policies, models, strict=True):
                self._watch(policy, model, advance)

    def results(self) -> dict[str, Any]:
        """What the JSON file holds; see docs/experiments.md."""
        job, settings = self.job, self.job.settings
        labels = [str(policy) for policy in job.policies]
        return {
            "model": job.source.name,
            "settings": asdict(settings),
            "blocks": self._blocks,
            "memory": self._memory,
            "drift": [_drift(label, [row for row in self._blocks if row["policy"] == label]) for label in labels],
            "steadiness": {label: watched.series() for label, watched in self._steadiness.items()},
            "notes": list(job.notes),
            "environment": environment(threads=settings.threads, dtype=job.dtype, device=job.device),
        }

    def _time(self, models: Sequence[Any], advance: Callable[[str], None]) -> None:
        """Blocks in turn, with the control after each; memory after every round."""
        job, settings = self.job, self.job.settings
        control = job.load_model()
        runners = [
            Runner(model, sparsify(model, policy, tokenizer=job.tokenizer), job.tokens, settings.prompt)
            for policy, model in zip(job.policies, models, strict=True)
        ]
        try:
            for runner in runners:
                runner.prefill()
            for start in range(0, settings.tokens, settings.block):
                count = min(settings.block, settings.tokens - start)
                for runner in runners:
                    self._blocks.append({**runner.block(count), "ms_control": _control(control, job.tokens)})
                    advance(f"{runner.label}, {start + count} tokens")
                self._memory.append(_memory(start + count, runners))
        finally:
            for runner in runners:
                runner.run.restore()

    def _watch(self, policy: Policy, model: Any, advance: Callable[[str], None]) -> None:
        """The same tokens again, several to a call; each chooses for itself as if it came alone."""
        job, settings = self.job, self.job.settings
        watched = self._steadiness[str(policy)] = Steadiness(settings.window)
        with sparsify(model, policy, tokenizer=job.tokenizer, observers=(watched,)) as run:
            runner = Runner(model, run, job.tokens, settings.prompt)
            watched.cache = runner.cache
            runner.prefill()
            with run.decoding():
                for start in range(0, settings.tokens, settings.block):
                    runner.feed(min(settings.block, settings.tokens - start))
                    advance(f"{policy}, sets")


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * _PAGE_BYTES if statm.is_file() else None


def _memory(step: int, runners: Sequence[Runner]) -> dict[str, Any]:
    """What the process holds, and what of it caches and indexes account for."""
    held = [runner.kv_bytes() for runner in runners]
    return {
        "step": step,
        "resident_bytes": resident_bytes(),
        "kv_bytes": sum(used for used, _ in held),
        "kv_reserved_bytes": sum(reserved for _, reserved in held),
        "index_bytes": sum(runner.run.stats().index_bytes for runner in runners),
    }


@torch.inference_mode()
def _control(model: Any, tokens: Sequence[int]) -> float:
    """Milliseconds of a stock step in a context of a few tokens: median of `CONTROL_STEPS`."""
    cache, times = DynamicCache(), list[float]()
    for number in range(CONTROL_STEPS):
        token = torch.tensor([[tokens[number % len(tokens)]]], device=model.device)
        start = time.perf_counter()
        model(token, past_key_values=cache, use_cache=True)
        synchronize(token.device)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _drift(policy: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Slopes of the blocks' medians over the context, per 10,000 tokens, as shares of the median block.

    Theil-Sen: the median slope between two blocks, with its 95% interval. "ms" as the clock says, "controlled" in
    units of the control, "expected" from the bytes that the cost model counts.
    """
    context = [row["context"] for row in rows]
    series = {
        "ms": [row["ms"] for row in rows],
        "controlled": [row["ms"] / row["ms_control"] for row in rows],
        "pass": [row["ms_pass"] for row in rows if row["ms_pass"] is not None],
        "expected": [row["expected_bytes"] for row in rows],
    }
    return {"policy": policy, **{name: _slope(values, context) for name, values in series.items()}}


def _slope(values: Sequence[float], context: Sequence[int]) -> dict[str, float] | None:
    if len(values) != len(context) or len(values) < 3:
        return None
    slope, _, low, high = theilslopes(values, context)
    unit = 10_000 / statistics.median(values)
    return {"slope": float(slope) * unit, "low": float(low) * unit, "high": float(high) * unit}
