"""Time of single operations on one layer's cache: `python -m benchmarks kernels`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from saccade.bench import baselines
from saccade.bench.grid import Grid, GridJob, GridSettings, OnUnit
from saccade.bench.rows import quartiles
from saccade.errors import KernelError, SaccadeError
from saccade.recipes.machine import read_bandwidth, synchronize
from saccade.types import Softmax

from .operations import OPERATIONS, Layer, Operation

COLD = 512 * 2**20
"""Bytes of caches that calls go round in: several times any last-level cache."""

IMPLEMENTATIONS = ("auto", "native", "cpu", "triton", "reference")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One operation at one setting: medians in microseconds per call.

    Attributes:
        operation, implementation: what ran; `torch-sdpa` for torch's dense attention.
        us: median; `us_fast` and `us_slow` are the quartiles.
        bytes: that the operation must move, `gb_s` what that makes of its time.
        share_of_bandwidth: `gb_s` over the read bandwidth measured in the same run.
        over_dense: its time over that of the fastest dense attention of the same setting.
    """

    operation: str
    implementation: str
    context: int
    batch: int
    threads: int
    us: float
    us_fast: float
    us_slow: float
    bytes: int
    gb_s: float
    share_of_bandwidth: float
    over_dense: float | None = None


@dataclass(frozen=True, slots=True)
class KernelSettings(GridSettings):
    """What the user can choose; see `python -m benchmarks kernels --help`."""

    operations: Sequence[str]
    implementations: Sequence[str]
    budget: int
    rounds: int


@dataclass(frozen=True, slots=True)
class KernelJob(GridJob):
    """Checked settings."""

    operations: tuple[Operation, ...]
    implementations: tuple[str, ...]
    budget: int
    rounds: int

    @classmethod
    def check(cls, settings: KernelSettings) -> KernelJob:
        """Resolve settings, or raise a SaccadeError about the first that is not valid."""
        known = {operation.name: operation for operation in OPERATIONS}
        for what, names, valid in (
            ("operation", settings.operations, tuple(known)),
            ("implementation", settings.implementations, IMPLEMENTATIONS),
        ):
            for name in names:
                if name not in valid:
                    raise SaccadeError(f"unknown {what} {name!r}; valid: {', '.join(valid)}")
        grid = Grid.check(settings)
        if min(grid.contexts) <= settings.budget:
            raise SaccadeError(
                f"context {min(grid.contexts)} is within the budget of {settings.budget}: nothing is chosen"
            )
        chosen = tuple(known[name] for name in dict.fromkeys(settings.operations)) or OPERATIONS
        return cls(grid, (), chosen, tuple(dict.fromkeys(settings.implementations)), settings.budget, settings.rounds)

    def run(self, on_unit: OnUnit) -> dict[str, Any]:
        return self.grid.run(self.grid.results(budget=self.budget), self._measure, on_unit)

    @torch.inference_mode()
    def _measure(self, context: int, batch: int, threads: int) -> list[KernelRow]:
        """All operations in turns, each call on the next of several caches."""
        shape, dtype, device = self.grid.shape, self.grid.dtype, self.grid.device
        size = 2 * context * batch * shape.kv_heads * shape.head_dim * dtype.itemsize
        layers = [
            Layer.random(shape, context, batch, self.budget, dtype, device, seed)
            for seed in range(max(2, -(-COLD // size)))
        ]
        calls = self._calls(layers[0])
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        bandwidth = read_bandwidth(device)
        for turn in range(self.rounds + 1):
            for place, (key, call) in enumerate(calls.items()):
                # One step further every turn, and not the cache that the call before has just read.
                layer = layers[(turn + place) % len(layers)]
                synchronize(device)
                start = time.perf_counter()
                call(layer)
                synchronize(device)
                if turn > 0:
                    times[key].append(time.perf_counter() - start)
        moved = {operation.name: operation.moved(layers[0]) for operation in OPERATIONS}
        dense = min((statistics.median(taken) for (name, _), taken in times.items() if name == "dense"), default=None)
        rows = []
        for (name, implementation), taken in times.items():
            fast, median, slow = quartiles(taken, 1e6)
            speed = moved[name] / median / 1e3
            rows.append(
                KernelRow(
                    *(name, implementation, context, batch, threads, median, fast, slow),
                    bytes=moved[name],
                    gb_s=speed,
                    share_of_bandwidth=speed / bandwidth,
                    over_dense=None if dense is None else 1e-6 * median / dense,
                )
            )
        return rows

    def _calls(self, layer: Layer) -> dict[tuple[str, str], Callable[[Layer], Any]]:
        """What can run here, once checked; an implementation that an operation does not have is left out."""
        calls: dict[tuple[str, str], Callable[[Layer], Any]] = {}
        for operation in self.operations:
            for implementation in self.implementations if operation.kernel else ("auto",):
                call = _bound(operation, implementation)
                try:
                    result = call(layer)
                except KernelError:
                    continue
                operation.check(layer, result)
                calls[operation.name, implementation] = call
        if any(operation.name == "dense" for operation in self.operations):
            calls["dense", "torch-sdpa"] = _sdpa
        if not calls:
            raise SaccadeError(f"none of {', '.join(self.implementations)} takes any of these operations here")
        return calls


def _bound(operation: Operation, implementation: str) -> Callable[[Layer], Any]:
    return lambda layer: operation.run(layer, implementation)


def _sdpa(layer: Layer) -> Any:
    return baselines.folded_sdpa(layer.q, layer.kv, Softmax(float(layer.q.shape[2]) ** -0.5))
