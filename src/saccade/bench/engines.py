"""Engines of vLLM, stock and under policies, started for a benchmark one group after another."""

import json
import shlex
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..adapters.vllm.cache_dtype import VALID, number_type
from ..adapters.vllm.options import ServeOptions
from ..checkpoints.load import skeleton_of
from ..errors import SaccadeError
from ..methods.policy import Policy
from ..recipes.machine import copy_bandwidth, free_memory
from ..types import SLIDING
from .grid import Grid, GridJob, OnUnit, PolicySettings
from .synthetic import prepare_process
from .variants import STOCK

CHUNK = 16_384
"""Tokens of a step before decoding begins; vLLM runs as many through the model when it starts."""

QUANTIZED = "fp8_per_tensor"
"""What vLLM may make of random weights as it loads: a byte each, but for embeddings and head."""

H200 = 4_200
"""GB/s that copying reaches on an H200 which nobody else uses."""

AnyPoint = TypeVar("AnyPoint")


@dataclass(frozen=True, slots=True)
class EngineSettings(PolicySettings):
    """What the user says of engines; None is the device's default."""

    block: int | None = None
    memory: float = 0.9
    tensor_parallel: int = 1
    kv_cache_dtype: str = "auto"
    rectify_together: bool = False
    draft_rate: float | None = None
    quantization: str | None = None

    def check(self, grid: Grid) -> tuple[int, dict[str, Policy | None], tuple[str, ...]]:
        """Tokens of a block, policies by name, stock first, and notes; ours without a policy is timed if asked for.

        Raises:
            SaccadeError: about the first value that is not valid.
        """
        if not grid.served and grid.device.type != "cpu":
            raise SaccadeError(f"device {grid.device.type!r} is not valid: vLLM is timed on cpu or cuda")
        if not grid.served and self.tensor_parallel > 1:
            raise SaccadeError(f"tensor-parallel={self.tensor_parallel} is not valid on a CPU: 1 is")
        if not 0 < self.memory < 1:
            raise SaccadeError(f"memory={self.memory} is not valid: a share of the device's, such as 0.9")
        if self.kv_cache_dtype not in VALID:
            raise SaccadeError(f"kv-cache-dtype={self.kv_cache_dtype} is not valid: one of {', '.join(VALID)}")
        if self.quantization not in (None, QUANTIZED):
            raise SaccadeError(f"quantization={self.quantization} is not valid: {QUANTIZED}")
        if self.quantization and not grid.served:
            raise SaccadeError(f"quantization={self.quantization} needs --device cuda")
        block = self.block or (16 if grid.served else 32)
        if block % 16:
            raise SaccadeError(f"block={block} is not valid: a multiple of 16, vLLM's unit")
        chosen, notes = self.resolve(grid.shape)
        timed = [policy for policy in chosen if str(policy) != "dense" or "dense" in self.policies]
        for policy in timed:
            plan = policy.plan(grid.shape)
            if (page := plan.bounds_page) is not None and block % page:
                advice = f"pass --block {lcm(page, 16)}"
                raise SaccadeError(f"{policy}: block={block} is no multiple of its page={page}; {advice}")
            if plan.reads_text and not Path(grid.name, "tokenizer.json").is_file():
                told = f"shape {grid.name!r} has no tokenizer; a folder with one is needed"
                raise SaccadeError(f"{policy} reads text: {told}")
        if self.rectify_together and all(policy.rectify is None for policy in timed):
            raise SaccadeError("rectify-together: none of these policies has dense passes")
        if self.draft_rate is not None and not any(ServeOptions(policy).drafts for policy in timed):
            told = "valid only beside drafts: rectify=8:verify, or --drafts 8"
            raise SaccadeError(f"draft-rate={self.draft_rate} is {told}")
        if self.draft_rate is not None and not 0 <= self.draft_rate <= 1:
            raise SaccadeError(f"draft-rate={self.draft_rate} is not valid: from 0 to 1, such as 0.97")
        return block, {STOCK: None, **{str(policy): policy for policy in timed}}, notes

    def served(self, policy: Policy | None) -> ServeOptions | None:
        """What an engine is told; None: nothing, as stock."""
        if policy is None:
            return None
        return ServeOptions(policy, rectify_together=self.rectify_together and policy.rectify is not None)


@dataclass(frozen=True, slots=True)
class EngineJob(GridJob, Generic[AnyPoint]):
    """Checked settings; stock vLLM is always measured.

    Attributes:
        settings: as given, what a run that goes on is recognised by.
        policies: by name; None is stock.
        points: what every engine is measured at.
        groups: names of the engines that stand side by side, group after group.
        block: tokens of a block of vLLM's cache.
        longest: most tokens of a row.
        row: the kind of rows, each with a `policy` and a `point`.
        program: whose command line this is.
    """

    row: ClassVar[type[Any]]
    program: ClassVar[tuple[str, ...]] = ("saccade",)
    settings: EngineSettings
    policies: Mapping[str, Policy | None]
    points: tuple[AnyPoint, ...]
    groups: tuple[tuple[str, ...], ...]
    block: int
    longest: int

    @property
    def units(self) -> int:
        return len(self.groups) * len(self.points)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cache."""
        return number_type(self.settings.kv_cache_dtype, self.grid.dtype).itemsize

    @property
    @abstractmethod
    def most(self) -> int:
        """Rows that are decoded together at the largest point."""

    @abstractmethod
    def start(self, policy: Policy | None, settings: dict[str, Any]) -> Any:
        """An engine with `facts` and `close()`."""

    @abstractmethod
    def blocks(self, point: AnyPoint) -> int:
        """Blocks that a point takes if nothing in it waits."""

    def needed(self, point: AnyPoint) -> int:
        """Blocks without which a point cannot be measured."""
        return self.blocks(point)

    @abstractmethod
    def said(self, point: AnyPoint) -> str:
        """A point in words."""

    @abstractmethod
    def measure(self, engines: Mapping[str, Any], point: AnyPoint) -> list[Any]:
        """One row per engine."""

    @abstractmethod
    def compare(self, rows: Sequence[Any], bandwidth: float) -> list[Any]:
        """Rows by point, with what compares them; bandwidth in GB/s."""

    def run(self, on_unit: OnUnit, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Measure everything, or what is missing in the results of a run that was cut off.

        Raises:
            SaccadeError: if those are of other settings or another device.
        """
        told = json.loads(json.dumps(asdict(self.settings)))
        if before is not None and before.get("settings") != told:
            raise SaccadeError("the results to go on with are of other settings; give another --json, or no --resume")
        prepare_process(served=self.grid.served)
        self._refuse_small_device()
        # Where files lie on this machine is no part of what was run.
        given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
        command = shlex.join([*self.program, *given])
        results = self.grid.results(settings=told, command=command, engines={}, notes=[])
        here = results["environment"]
        bandwidth = here["read_bandwidth_gb_s"]
        if self.grid.served:
            bandwidth = here["copy_bandwidth_gb_s"] = round(copy_bandwidth(self.grid.device), 1)
            if "H200" in here["device"] and bandwidth < H200:
                results["notes"].append(f"this H200 copies {bandwidth:,.0f} GB/s, less than {H200:,}: others use it")
        if before is not None:
            if before["environment"]["device"] != here["device"]:
                raise SaccadeError(f"the results to go on with are of {before['environment']['device']}")
            results |= {name: before[name] for name in ("rows", "engines")}
        rows = [self.row(**row) for row in results["rows"]]
        with tempfile.TemporaryDirectory() as folder:
            settings = self._engine_settings(folder)
            for group in self.groups:
                found = {(row.policy, row.point) for row in rows}
                missing = [point for point in self.points if any((name, point) not in found for name in group)]
                for done, new in self._group(group, missing, settings, results) if missing else ():
                    rows = self.compare([*rows, *new], bandwidth * self.settings.tensor_parallel)
                    results["rows"] = [asdict(row) for row in rows]
                    on_unit(done, results)
        return results

    def _refuse_small_device(self) -> None:
        """Raise a SaccadeError if weights and a row at its longest do not fit; vLLM says so after minutes."""
        grid, free = self.grid, free_memory(self.grid.device) if self.grid.served else None
        if free is None:
            return
        room = int(self.settings.memory * free) * self.settings.tensor_parallel
        weights = skeleton_of(grid.config, grid.name).num_parameters() * grid.dtype.itemsize
        block = self.block * grid.shape.token_bytes(self.itemsize)
        wanted, most = self.blocks_of(self.longest, 1), (room - weights) // block
        if wanted <= most:
            return
        rows = self.block * (most - wanted + -(-self.longest // self.block))
        fits = f"rows of {rows:,} tokens fit" if rows > 0 else "no row fits"
        raise SaccadeError(
            f"{grid.name}: {weights / 1e9:.1f} GB of weights and {wanted * block / 1e9:.1f} GB of a row of "
            f"{self.longest:,} tokens are more than memory={self.settings.memory:g} of {free / 1e9:.1f} GB: {fits}"
        )

    def _group(
        self, group: Sequence[str], points: Sequence[AnyPoint], settings: dict[str, Any], results: dict[str, Any]
    ) -> Iterator[tuple[str, list[Any]]]:
        """Start engines, measure them at every point, and close them."""
        device = self.grid.device
        free = free_memory(device) if self.grid.served else None
        engines: dict[str, Any] = {}
        try:
            for name in group:
                engines[name] = self.start(self.policies.get(name), settings)
                results["engines"][name] = engines[name].facts
            held = min(engine.facts["tokens"] for engine in engines.values()) // self.block - 1
            for point in points:
                done = f"{self.said(point)}, {', '.join(group)}"
                if self.needed(point) > held:
                    results["notes"].append(f"{done}: left out, the cache has no room")
                    continue
                torch.set_num_threads(max(self.grid.threads))
                yield done, self.measure(engines, point)
        except Exception as error:
            # One engine that fails does not cost the others' figures; without stock there are none.
            if STOCK in group:
                raise
            results["notes"].append(f"{', '.join(group)}: failed, {str(error).strip().partition(chr(10))[0]}")
        finally:
            for engine in engines.values():
                engine.close()
            # Until its process has given memory back, but for what others have taken meanwhile.
            until = time.monotonic() + 60
            while free is not None and (free_memory(device) or 0) < free - 2**30 and time.monotonic() < until:
                time.sleep(0.2)

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
            "max_num_seqs": self.most,
            "block_size": self.block,
            "kv_cache_dtype": self.settings.kv_cache_dtype,
            "apart": SLIDING in shape.kinds,
        }
        texts = any(one is not None and one.plan(shape).reads_text for one in self.policies.values())
        settings |= {"tokenizer": grid.name} if texts else {"skip_tokenizer_init": True}
        if grid.served:
            parallel = self.settings.tensor_parallel
            settings |= {"quantization": self.settings.quantization} if self.settings.quantization else {}
            return {**settings, "gpu_memory_utilization": self.settings.memory, "tensor_parallel_size": parallel}
        blocks = 8 + max(self.blocks(point) for point in self.points)
        # The bounds' share of a page is at most a quarter.
        room = blocks * self.block * shape.token_bytes(self.itemsize) * 5 // 4
        return {**settings, "enforce_eager": True, "num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": room}

    def blocks_of(self, length: int, rows: int) -> int:
        """Blocks that rows of a length take; layers that keep less take some of the same pool, group by group.

        Such a group has as many layers as have full attention, and holds what two steps of one row bring beside what
        it keeps.
        """
        shape = self.grid.shape
        full = len(shape.full_layers)
        groups, kept = -(-(shape.layers - full) // full), min(shape.window or 0, length)
        others = rows * (-(-kept // self.block) + 2) + -(-min(2 * CHUNK, length) // self.block)
        return rows * -(-length // self.block) + groups * others
