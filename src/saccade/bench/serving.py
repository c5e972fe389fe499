"""Time per output token of vLLM: as it comes and under policies, in turns, at contexts that nobody prefilled."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..adapters.vllm.options import ServeOptions
from ..checkpoints.shape import parameters_read
from ..errors import SaccadeError
from ..methods.policy import Policy
from ..plans.cost import cost_of
from .grid import Grid, GridJob, OnUnit, PolicySettings
from .rows import Row, complete, quartiles
from .synthetic import SyntheticEngine, prepare_process
from .variants import DENSE, STOCK

TURN = 3
"""Timed steps an engine takes before the next one has its turn."""

EMPTY = 16
"""Tokens that stand for an empty context: a request cannot have none."""


@dataclass(frozen=True, slots=True)
class ServingSettings(PolicySettings):
    """What the user can choose; see `saccade bench serve --help`."""

    block: int


@dataclass(frozen=True, slots=True)
class ServingJob(GridJob):
    """Checked settings; stock vLLM is always measured, and an empty context, from which the ceiling is counted."""

    policies: Mapping[str, Policy | None]
    steps: int
    block: int

    @classmethod
    def check(cls, settings: ServingSettings) -> ServingJob:
        """Read settings, or raise a SaccadeError: one line about the first that is not valid."""
        block = settings.block
        if block % 16:
            raise SaccadeError(f"block={block} is not valid: a multiple of 16, vLLM's unit")
        grid = Grid.check(settings)
        grid = replace(grid, contexts=tuple(dict.fromkeys((EMPTY, *grid.contexts))))
        chosen, notes = settings.resolve(grid.shape)
        # Stock is the dense baseline here; ours is measured if it was asked for.
        policies = {str(policy): policy for policy in chosen if str(policy) != "dense" or "dense" in settings.policies}
        for policy in policies.values():
            if policy.rectify is not None:
                raise SaccadeError(f"{policy}: bench serve times single steps; add rectify=none")
            selector = policy.plan(grid.shape).selector
            page = None if selector is None else selector.bounds_page
            if page is not None and block % page:
                raise SaccadeError(
                    f"{policy}: block={block} is no multiple of its page={page}; pass --block {lcm(page, 16)}"
                )
        return cls(grid, notes, {STOCK: None, **policies}, settings.steps, block)

    def run(self, on_unit: OnUnit) -> dict[str, Any]:
        prepare_process()
        results = self.grid.results()
        bandwidth = results["environment"]["read_bandwidth_gb_s"]
        empty: dict[int, Row] = {}
        with torch.device("meta"):
            weights = parameters_read(AutoModelForCausalLM.from_config(self.grid.config)) * self.grid.dtype.itemsize

        def measured(context: int, batch: int, threads: int) -> list[Row]:
            rows = self._rows(self._measure(engines, context, batch), weights, context, batch, threads)
            # The empty context comes first, and stock first of all.
            base = empty.setdefault(batch, rows[0])
            return complete(rows, empty_ms=base.ms_per_token, empty_bytes=base.bytes, bandwidth=bandwidth)

        with tempfile.TemporaryDirectory() as folder:
            engines = self._engines(folder)
            self.grid.run(results, measured, on_unit)
            for engine in engines.values():
                engine.close()
        return results

    def _engines(self, folder: str) -> dict[str, SyntheticEngine]:
        grid, config, shape = self.grid, self.grid.config, self.grid.shape
        longest = max(grid.contexts) + 4 * (self.steps + 2 * TURN)
        config.max_position_embeddings = max(config.max_position_embeddings, 2 * longest)
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        rows = max(grid.batches)
        sizes = {
            "tokens": rows * -(-longest // self.block) * self.block,
            "rows": rows,
            "block": self.block,
            "bytes_per_token": 2 * shape.layers * shape.kv_heads * shape.head_dim * grid.dtype.itemsize,
        }
        dtype = str(grid.dtype).removeprefix("torch.")
        options = {name: None if policy is None else ServeOptions(policy) for name, policy in self.policies.items()}
        return {name: SyntheticEngine(folder, told, dtype=dtype, **sizes) for name, told in options.items()}

    def _measure(self, engines: dict[str, SyntheticEngine], context: int, batch: int) -> dict[str, list[float]]:
        """Seconds of each engine's steps, taken in turns; the first of a turn warms the caches and is not timed."""
        times: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.begin(context, batch)
            engine.step()
        for done in range(0, self.steps, TURN):
            for name, engine in engines.items():
                engine.step()
                times[name] += [engine.step()[0] for _ in range(min(TURN, self.steps - done))]
        for engine in engines.values():
            engine.end()
        return times

    def _rows(self, times: dict[str, list[float]], weights: float, context: int, batch: int, threads: int) -> list[Row]:
        """One row per engine; stock reads what a dense policy does."""
        shape, size, rows = self.grid.shape, self.grid.dtype.itemsize, []
        for name, taken in times.items():
            plan = (self.policies[name] or DENSE).plan(shape)
            cost = cost_of(plan, None, shape, context=context, batch=batch, kv_itemsize=size, weight_bytes=weights)
            fast, median, slow = quartiles(taken)
            rows.append(
                Row(
                    policy=name, runtime="vllm", context=context, batch=batch, threads=threads, steps=len(taken),
                    ms_per_token=median, ms_fast=fast, ms_slow=slow, bytes=cost.total,
                )
            )  # fmt: skip
        return rows
