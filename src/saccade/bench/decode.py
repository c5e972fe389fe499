"""`saccade bench decode`: time per token on a synthetic cache, dense decoders and policies interleaved."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..adapters.hf.attention import has_sinks, soft_cap_of
from ..adapters.hf.support import attention_modules, refuse_rewinding
from ..checkpoints.load import skeleton_of
from ..checkpoints.presets import random_model
from ..checkpoints.shape import shape_of
from ..checkpoints.traffic import state_bytes, weights_read
from ..decode.state import AttentionOperations
from ..errors import SaccadeError
from ..eval.subject import refuse_too_large
from ..methods.policy import Policy
from ..plans.cost import cost_of
from ..recipes.machine import read_bandwidth
from .baselines import STOCK, TORCH, Baseline, choose
from .grid import Grid, GridJob, OnUnit, PolicySettings
from .rows import DecodeRow, complete, row_of
from .variants import DENSE, Attached, Memory, Variant

TURN = 3
"""Timed steps a variant takes before the next one has its turn."""

ROOM = 256
"""Positions behind the longest context: a rectified policy decodes a whole period."""


@dataclass(frozen=True, slots=True)
class BenchSettings(PolicySettings):
    """What the user can choose; see `saccade bench decode --help`."""

    steps: int
    baselines: Sequence[str]


@dataclass(frozen=True, slots=True)
class BenchJob(GridJob):
    """Checked settings; dense is always among the policies, since every speed is quoted against it."""

    policies: tuple[Policy, ...]
    steps: int
    baselines: tuple[Baseline, ...]

    @classmethod
    def check(cls, settings: BenchSettings, more: Sequence[Baseline] = ()) -> BenchJob:
        """Read settings, with `more` baselines than our own, or raise a SaccadeError about the first not valid."""
        grid = Grid.check(settings, shortest=0)
        policies, notes = settings.resolve(grid.shape)
        for policy in policies:
            refuse_rewinding(policy, grid.shape)
            if policy.rectify is not None and policy.rectify.mode == "verify":
                raise SaccadeError(
                    f"{policy}: how many drafts stand depends on the text, and random keys have none; "
                    f"use rectify={policy.rectify.every}"
                )
        skeleton = skeleton_of(grid.config, grid.name)
        most = {"tokens": max(grid.contexts), "rows": max(grid.batches)}
        refuse_too_large(grid.shape, skeleton.num_parameters(), grid.device, grid.dtype, **most)
        capped = any(has_sinks(module) or soft_cap_of(module) is not None for module in attention_modules(skeleton))

        def refusal(one: Baseline) -> str | None:
            uncapped = "it knows no sinks and no soft-cap" if capped and one is not STOCK else None
            return uncapped or one.refusal(grid.device, grid.shape.head_dim)

        chosen, left_out = choose(settings.baselines, (STOCK, TORCH, *more), refusal)
        return cls(grid, (*notes, *left_out), policies, settings.steps, chosen)

    def run(self, on_unit: OnUnit) -> dict[str, Any]:
        grid = self.grid
        model = random_model(grid.name, positions=max(grid.contexts) + ROOM, dtype=grid.dtype, device=grid.device)
        results = grid.results()
        bandwidths = results["environment"]["bandwidths"] = []

        def measured(context: int, batch: int, threads: int) -> list[DecodeRow]:
            setting = {"context": context, "batch": batch, "threads": threads}
            rows, bandwidth = self.measure(model, **setting)
            bandwidths.append({**setting, "read_gb_s": round(bandwidth, 1)})
            return rows

        return grid.run(results, measured, on_unit)

    def measure(
        self, model: PreTrainedModel, *, context: int, batch: int, threads: int
    ) -> tuple[list[DecodeRow], float]:
        """Time decode steps at `context` cached tokens; variants take turns of `TURN` steps until each has `steps`.

        A rectified policy takes two whole periods. Among the variants are dense decoders without a cache (of one token,
        beside recurrent layers), from which the ceiling is counted, and a reading of the memory's bandwidth. The cache
        holds random keys and values: no prefill is run. After a turn it is cropped back. `model` is stock, with `sdpa`
        attention; torch has that many threads.

        Returns:
            Rows, and the read bandwidth in GB/s.

        Raises:
            SaccadeError: if attention differs from float64, or a dense decoder's logits from the stock model's.
        """
        longest = max(policy.phase.period for policy in self.policies) + 1
        variants = _variants(model, self.policies, Memory(model, context, batch, longest), self.baselines)
        stock = [one for one in self.baselines if one is STOCK]
        # A recurrent layer's first step is a prompt's, which takes longer than the steps behind it.
        tokens = 1 if shape_of(model.config).recurrent else 0
        empty = _variants(model, [DENSE], Memory(model, tokens, batch, longest), stock)
        for variant in (*variants, *empty):
            variant.turn(0)
        _check([variant for variant in variants if variant.plan.selector is None])
        bandwidth = []
        for done in range(0, self.steps, TURN):
            count = min(TURN, self.steps - done)
            for variant in (*variants, *empty):
                if variant.rectify is None:
                    variant.turn(count)
                elif not variant.steps:
                    # Two whole periods at once: quartiles want two plain steps.
                    variant.turn(2 * variant.phase.period)
            bandwidth.append(read_bandwidth(model.device, repeats=1))
        shape, size = shape_of(model.config), model.dtype.itemsize
        weight_bytes, states = weights_read(model, batch) * size, state_bytes(model.config, model.dtype)
        sizes: dict[str, Any] = {"context": context, "batch": batch, "kv_itemsize": size, "weight_bytes": weight_bytes}
        sizes["state_bytes"] = states
        rows = [row_of(one, threads, cost_of(one.plan, one.rectify, shape, **sizes).total) for one in variants]
        speed = statistics.median(bandwidth)
        least = min(1e3 * statistics.median(step.seconds for step in variant.steps) for variant in empty)
        for variant in (*variants, *empty):
            variant.close()
        gc.collect()
        empty_bytes = weight_bytes + 2 * batch * (states or 0)
        return complete(rows, empty_ms=least, empty_bytes=empty_bytes, bandwidth=speed), speed


def _variants(
    model: PreTrainedModel, policies: Sequence[Policy], memory: Memory, baselines: Sequence[Baseline]
) -> list[Variant]:
    def baseline(one: Baseline) -> Variant:
        if one.dense is None:
            return Variant(model, memory, memory.cache())
        attention = AttentionOperations(dense=one.dense(memory.context, memory.batch), name=one.name)
        return Attached(model, memory, DENSE, attention)

    return [*map(baseline, baselines), *(Attached(model, memory, policy) for policy in policies)]


def _check(dense: Sequence[Variant]) -> None:
    """A variant that attends to everything must reproduce the first such variant's logits."""
    for variant in dense[1:]:
        assert variant.logits is not None and dense[0].logits is not None
        error = (variant.logits.float() - dense[0].logits.float()).norm() / dense[0].logits.float().norm()
        # Two roundings per layer of the residual stream, each half a unit in the last place, add up at worst linearly.
        budget = 2 * variant.model.config.num_hidden_layers * torch.finfo(variant.model.dtype).eps / 2
        if error > budget:
            raise SaccadeError(
                f"{variant.policy} on {variant.runtime} differs from {dense[0].policy} on {dense[0].runtime} by "
                f"{error:.2e} of the logits' norm (budget {budget:.2e}); a wrong result is not timed"
            )
