"""Time of single operations on one layer's cache: `saccade bench kernels`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from saccade.bench import baselines
from saccade.checkpoints.load import DTYPES, pick_device
from saccade.checkpoints.presets import read_config
from saccade.checkpoints.shape import shape_of
from saccade.errors import KernelError, SaccadeError
from saccade.eval.output import check_file, whole_numbers, write_json
from saccade.machine import environment, read_bandwidth, synchronize

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
class KernelJob:
    """Checked settings of `saccade bench kernels`."""

    shape: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    operations: tuple[Operation, ...]
    implementations: tuple[str, ...]
    budget: int
    rounds: int
    dtype: torch.dtype
    device: torch.device
    json_file: Path | None

    @classmethod
    def check(
        cls,
        *,
        shape: str,
        contexts: list[str],
        batches: list[str],
        threads: list[str],
        operations: list[str],
        implementations: list[str],
        budget: int,
        rounds: int,
        dtype: str,
        device: str,
        json: Path | None,
    ) -> KernelJob:
        """Read the settings.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        known = {operation.name: operation for operation in OPERATIONS}
        for name in operations:
            if name not in known:
                raise SaccadeError(f"unknown operation {name!r}; valid: {', '.join(known)}")
        for name in implementations:
            if name not in IMPLEMENTATIONS:
                raise SaccadeError(f"unknown implementation {name!r}; valid: {', '.join(IMPLEMENTATIONS)}")
        if dtype not in DTYPES:
            raise SaccadeError(f"unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
        read_config(shape)
        made = cls(
            shape=shape,
            contexts=whole_numbers("context", ",".join(contexts), at_least=1),
            batches=whole_numbers("batch", ",".join(batches), at_least=1),
            threads=whole_numbers("threads", ",".join(threads), at_least=1),
            operations=tuple(known[name] for name in dict.fromkeys(operations)) or OPERATIONS,
            implementations=tuple(dict.fromkeys(implementations)),
            budget=budget,
            rounds=rounds,
            dtype=DTYPES[dtype],
            device=pick_device(device),
            json_file=json,
        )
        if min(made.contexts) <= budget:
            raise SaccadeError(f"context {min(made.contexts)} is within the budget of {budget}: nothing is chosen")
        if json is not None:
            check_file(json)
        return made

    @property
    def units(self) -> int:
        """Measurements to make, one per context, batch and number of threads."""
        return len(self.contexts) * len(self.batches) * len(self.threads)

    def run(self, on_unit: Callable[[str], None]) -> dict[str, Any]:
        """Measure everything; after every measurement the JSON file holds all rows so far."""
        torch.set_num_threads(max(self.threads))
        results: dict[str, Any] = {
            "shape": self.shape,
            "budget": self.budget,
            "rows": [],
            "environment": environment(threads=max(self.threads), dtype=self.dtype, device=self.device),
        }
        for context, batch, threads in product(self.contexts, self.batches, self.threads):
            results["rows"] += [asdict(row) for row in self._measure(context, batch, threads)]
            on_unit(f"context {context}, batch {batch}, threads {threads}")
            if self.json_file is not None:
                write_json(self.json_file, results)
        return results

    @torch.inference_mode()
    def _measure(self, context: int, batch: int, threads: int) -> list[KernelRow]:
        """All operations in turns, each call on the next of several caches."""
        torch.set_num_threads(threads)
        shape = shape_of(read_config(self.shape))
        size = 2 * context * batch * shape.kv_heads * shape.head_dim * self.dtype.itemsize
        layers = [
            Layer.random(shape, context, batch, self.budget, self.dtype, self.device, seed)
            for seed in range(max(2, -(-COLD // size)))
        ]
        calls = self._calls(layers[0])
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        bandwidth = read_bandwidth(self.device)
        for turn in range(self.rounds + 1):
            for place, (key, call) in enumerate(calls.items()):
                # One step further every turn, and not the cache that the call before has just read.
                layer = layers[(turn + place) % len(layers)]
                synchronize(self.device)
                start = time.perf_counter()
                call(layer)
                synchronize(self.device)
                if turn > 0:
                    times[key].append(time.perf_counter() - start)
        moved = {operation.name: operation.moved(layers[0]) for operation in OPERATIONS}
        dense = min((statistics.median(taken) for (name, _), taken in times.items() if name == "dense"), default=None)
        rows = []
        for (name, implementation), taken in times.items():
            fast, median, slow = statistics.quantiles(taken, n=4)
            speed = moved[name] / median / 1e9
            rows.append(
                KernelRow(
                    *(name, implementation, context, batch, threads, 1e6 * median, 1e6 * fast, 1e6 * slow),
                    bytes=moved[name],
                    gb_s=speed,
                    share_of_bandwidth=speed / bandwidth,
                    over_dense=None if dense is None else median / dense,
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
    return baselines.folded_sdpa(layer.q, layer.kv, scale=float(layer.q.shape[2]) ** -0.5)
