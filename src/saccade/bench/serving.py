"""Time per output token of vLLM: as it comes and under policies, at contexts that nobody prefilled."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import lcm
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..adapters.vllm.options import ServeOptions
from ..checkpoints.traffic import state_bytes, weights_read
from ..errors import SaccadeError
from ..machine import copy_bandwidth, free_memory
from ..methods.policy import Policy
from ..plans.cost import cost_of
from ..types import SLIDING
from .grid import Grid, GridJob, OnUnit, PolicySettings, parse_points
from .rows import ServingRow, compared, quartiles
from .synthetic import SyntheticEngine, prepare_process
from .variants import DENSE, STOCK, STOCK_AGAIN

EMPTY = 16
"""Tokens that stand for an empty context: a request cannot have none."""

CHUNK = 16_384
"""Tokens of a step before decoding begins; vLLM runs as many through the model when it starts."""

SPARE = 512
"""Tokens that rows may decode while others of their batch arrive."""

H200 = 4_200
"""GB/s that copying reaches on an H200 which nobody else uses."""


@dataclass(frozen=True, slots=True)
class ServingSettings(PolicySettings):
    """What the user can choose; see `saccade bench serve --help`. None is the device's default."""

    points: Sequence[str] = ()
    block: int | None = None
    max_model_len: int | None = None
    memory: float = 0.9
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class ServingJob(GridJob):
    """Checked settings; stock vLLM is always measured, and an empty context, from which the ceiling is counted.

    Attributes:
        settings: as given, what a run that goes on is recognised by.
        points: contexts and batches, those of an empty context first.
        groups: names of the engines that stand side by side and take turns, group after group.
        warm, turn: steps that do not count before the first turn, and those that an engine takes in a turn.
        room: tokens that a row may decode, those before the first turn and while others arrive counted.
        longest: most tokens of a row.
    """

    settings: ServingSettings
    policies: Mapping[str, Policy | None]
    points: tuple[tuple[int, int], ...]
    groups: tuple[tuple[str, ...], ...]
    warm: int
    turn: int
    steps: int
    block: int
    room: int
    longest: int

    @classmethod
    def check(cls, settings: ServingSettings) -> ServingJob:
        """Read settings, or raise a SaccadeError: one line about the first that is not valid."""
        points = parse_points(settings.points)
        if points:
            contexts, batches = ([str(number) for number in dict.fromkeys(side)] for side in zip(*points, strict=True))
            settings = replace(settings, contexts=contexts, batches=batches)
        grid = Grid.check(settings)
        points = points or tuple((context, batch) for context in grid.contexts for batch in grid.batches)
        points = tuple(dict.fromkeys((*((EMPTY, batch) for _, batch in points), *points)))
        served = grid.device.type == "cuda"
        if not served and grid.device.type != "cpu":
            raise SaccadeError(f"device {grid.device.type!r} is not valid: vLLM is timed on cpu or cuda")
        if not served and settings.tensor_parallel > 1:
            raise SaccadeError(f"tensor-parallel={settings.tensor_parallel} is not valid on a CPU: 1 is")
        if not 0 < settings.memory < 1:
            raise SaccadeError(f"memory={settings.memory} is not valid: a share of the device's, such as 0.9")
        block = settings.block or (16 if served else 32)
        if block % 16:
            raise SaccadeError(f"block={block} is not valid: a multiple of 16, vLLM's unit")
        chosen, notes = settings.resolve(grid.shape)
        # Stock is the dense baseline here; ours is measured if it was asked for.
        timed = [policy for policy in chosen if str(policy) != "dense" or "dense" in settings.policies]
        for policy in timed:
            _check_policy(policy, grid, block)
        policies = {STOCK: None, **{str(policy): policy for policy in timed}}
        steps = settings.steps or (64 if served else 12)
        warm, turn = (8, steps) if served else (1, 3)
        room = warm + 2 * steps + SPARE
        need = max(context for context, _ in points) + room
        longest = settings.max_model_len or need
        if longest < need:
            raise SaccadeError(
                f"max-model-len={longest} has no room for a context of {need - room} tokens and the {room} that may be "
                f"decoded: at least {need}"
            )
        groups: tuple[tuple[str, ...], ...] = (tuple(policies),)
        if served:
            groups = tuple((name,) for name in (*policies, STOCK_AGAIN))
        return cls(grid, notes, settings, policies, points, groups, warm, turn, steps, block, room, longest)

    @property
    def units(self) -> int:
        return len(self.groups) * len(self.points)

    def run(self, on_unit: OnUnit, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Measure everything, or what is missing in the results of a run that was cut off.

        Raises:
            SaccadeError: if those are of other settings or another device.
        """
        told = json.loads(json.dumps(asdict(self.settings)))
        if before is not None and before.get("settings") != told:
            raise SaccadeError("the results to go on with are of other settings; give another --json, or no --resume")
        served = self.grid.device.type == "cuda"
        prepare_process(served=served)
        # Where files lie on this machine is no part of what was run.
        given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
        command = shlex.join(["saccade", *given])
        results = self.grid.results(settings=told, command=command, engines={}, notes=[])
        here = results["environment"]
        bandwidth = here["read_bandwidth_gb_s"]
        if served:
            bandwidth = here["copy_bandwidth_gb_s"] = round(copy_bandwidth(self.grid.device), 1)
            if "H200" in here["device"] and bandwidth < H200:
                results["notes"].append(f"this H200 copies {bandwidth:,.0f} GB/s, less than {H200:,}: others use it")
        if before is not None:
            if before["environment"]["device"] != here["device"]:
                raise SaccadeError(f"the results to go on with are of {before['environment']['device']}")
            results |= {name: before[name] for name in ("rows", "engines")}
        rows = [ServingRow(**row) for row in results["rows"]]
        with tempfile.TemporaryDirectory() as folder:
            settings = self._engine_settings(folder)
            for group in self.groups:
                missing = self._missing(group, rows)
                for done, new in self._group(group, missing, settings, results) if missing else ():
                    rows = compared([*rows, *new], EMPTY, bandwidth * self.settings.tensor_parallel)
                    results["rows"] = [asdict(row) for row in rows]
                    on_unit(done, results)
        return results

    def _missing(self, group: Sequence[str], rows: Sequence[ServingRow]) -> list[tuple[int, int]]:
        found = {(row.policy, row.context, row.batch) for row in rows}
        return [point for point in self.points if any((name, *point) not in found for name in group)]

    def _group(
        self, group: Sequence[str], points: Sequence[tuple[int, int]], settings: dict[str, Any], results: dict[str, Any]
    ) -> Iterator[tuple[str, list[ServingRow]]]:
        """Start engines, time them at every point, and close them."""
        served, device = self.grid.device.type == "cuda", self.grid.device
        free = free_memory(device) if served else None
        engines: dict[str, SyntheticEngine] = {}
        try:
            for name in group:
                policy = self.policies.get(name)
                engines[name] = SyntheticEngine(None if policy is None else ServeOptions(policy), **settings)
                results["engines"][name] = engines[name].facts
            fit = min(engine.facts["tokens"] for engine in engines.values()) // self.block - 1
            for context, batch in points:
                done = f"context {context}, batch {batch}, {', '.join(group)}"
                if self._blocks(context, batch) > fit:
                    results["notes"].append(f"{done}: left out, the cache has no room")
                    continue
                torch.set_num_threads(max(self.grid.threads))
                yield done, self._rows(self._measure(engines, context, batch), context, batch)
        except Exception as error:
            # One engine that fails does not cost the others' figures; without stock there are none.
            if STOCK in group:
                raise
            results["notes"].append(f"{', '.join(group)}: failed, {str(error).strip().partition(chr(10))[0]}")
        finally:
            for engine in engines.values():
                engine.close()
            if free is not None:
                _wait_for_memory(device, free)

    def _engine_settings(self, folder: str) -> dict[str, Any]:
        """What all engines are started with; writes the model's configuration."""
        grid, config, shape = self.grid, self.grid.config, self.grid.shape
        config.max_position_embeddings = max(config.max_position_embeddings, self.longest)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.save_pretrained(folder)
        settings = {
            "model": folder,
            "dtype": str(grid.dtype).removeprefix("torch."),
            "max_model_len": self.longest,
            "max_num_seqs": max(batch for _, batch in self.points),
            "max_num_batched_tokens": CHUNK,
            "block_size": self.block,
            "apart": SLIDING in shape.kinds,
        }
        texts = any(_reads_text(policy, grid) for policy in self.policies.values())
        settings |= {"tokenizer": grid.name} if texts else {"skip_tokenizer_init": True}
        if grid.device.type == "cuda":
            parallel = self.settings.tensor_parallel
            return {**settings, "gpu_memory_utilization": self.settings.memory, "tensor_parallel_size": parallel}
        blocks = 8 + max(self._blocks(context, batch) for context, batch in self.points)
        # The bounds' share of a page is at most a quarter.
        room = blocks * self.block * shape.token_bytes(grid.dtype.itemsize) * 5 // 4
        return {**settings, "enforce_eager": True, "num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": room}

    def _blocks(self, context: int, batch: int) -> int:
        """Blocks that so many rows take; layers that keep less take some of the same pool, group by group.

        Such a group has as many layers as have full attention, and holds what two steps of one row bring beside what
        it keeps.
        """
        shape, length = self.grid.shape, context + self.room
        full = len(shape.full_layers)
        groups, kept = -(-(shape.layers - full) // full), min(shape.window or 0, length)
        passing = min(2 * CHUNK, length)
        others = batch * (-(-kept // self.block) + 2) + -(-passing // self.block)
        return batch * -(-length // self.block) + groups * others

    def _measure(self, engines: Mapping[str, SyntheticEngine], context: int, batch: int) -> dict[str, list[float]]:
        """Seconds of each engine's steps, taken in turns; the first of a turn warms the caches and is not timed."""
        times: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.begin(context, batch)
            for _ in range(self.warm):
                engine.round()
        for done in range(0, self.steps, self.turn):
            count = min(self.turn, self.steps - done)
            for name, engine in engines.items():
                ends = [engine.round() for _ in range(1 + count)]
                times[name] += [end - begin for begin, end in pairwise(ends)]
        for engine in engines.values():
            engine.end()
        return times

    def _rows(self, times: Mapping[str, Sequence[float]], context: int, batch: int) -> list[ServingRow]:
        """One row per engine; stock reads what a dense policy does."""
        grid, rows = self.grid, []
        with torch.device("meta"):
            weights = weights_read(AutoModelForCausalLM.from_config(grid.config), batch) * grid.dtype.itemsize
        size: dict[str, Any] = {"context": context, "batch": batch, "kv_itemsize": grid.dtype.itemsize}
        size |= {"weight_bytes": weights, "state_bytes": state_bytes(grid.config, grid.dtype)}
        for name, taken in times.items():
            cost = cost_of((self.policies.get(name) or DENSE).plan(grid.shape), None, grid.shape, **size)
            fast, median, slow = quartiles(taken)
            rows.append(
                ServingRow(
                    policy=name, runtime="vllm", context=context, batch=batch, threads=max(grid.threads),
                    steps=len(taken), ms_per_token=median, ms_fast=fast, ms_slow=slow, bytes=cost.total,
                )
            )  # fmt: skip
        return rows


def _check_policy(policy: Policy, grid: Grid, block: int) -> None:
    if policy.rectify is not None:
        raise SaccadeError(f"{policy}: bench serve times single steps; add rectify=none")
    selector = policy.plan(grid.shape).selector
    page = None if selector is None else selector.bounds_page
    if page is not None and block % page:
        raise SaccadeError(f"{policy}: block={block} is no multiple of its page={page}; pass --block {lcm(page, 16)}")
    if _reads_text(policy, grid) and not Path(grid.name, "tokenizer.json").is_file():
        raise SaccadeError(f"{policy} reads text: shape {grid.name!r} has no tokenizer; a folder with one is needed")


def _reads_text(policy: Policy | None, grid: Grid) -> bool:
    selector = None if policy is None else policy.plan(grid.shape).selector
    return selector is not None and selector.reads_text


def _wait_for_memory(device: torch.device, free: int, *, seconds: float = 60.0) -> None:
    """Until an engine's process has given its memory back, but for what others have taken meanwhile."""
    until = time.monotonic() + seconds
    while (free_memory(device) or 0) < free - 2**30 and time.monotonic() < until:
        time.sleep(0.2)
