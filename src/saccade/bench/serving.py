"""Time per output token of vLLM: as it comes and under policies, in turns, at contexts that nobody prefilled."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

import torch

from ..adapters.vllm.options import ServeOptions
from ..checkpoints.load import DTYPES
from ..checkpoints.presets import read_config
from ..checkpoints.shape import shape_of
from ..errors import SaccadeError
from ..eval.entry import at_budgets, parse_budgets
from ..eval.output import check_file, whole_numbers, write_json
from ..machine import environment
from ..methods.policy import Policy
from ..plans.cost import Cost, cost_of
from ..recipes.resolve import resolve_all
from .synthetic import SyntheticEngine, prepare_process

STOCK = "stock"
TURN = 3
"""Timed steps an engine takes before the next one has its turn."""

EMPTY = 16
"""Tokens that stand for an empty context: a request cannot have none."""


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One timing: medians over interleaved steps, in milliseconds per output token of every row of the batch.

    Attributes:
        policy: spec, or `stock`.
        runtime: `vllm`.
        context, batch, threads, steps: what was run.
        ms_per_token: median; `ms_fast` and `ms_slow` are the quartiles.
        bytes: that a step must move, by the cost model; weights included.
        ideal_ms: stock's time at an empty context of the same batch, and the bytes beyond it at the measured bandwidth.
        share_of_ceiling: `ideal_ms / ms_per_token`.
        speedup_over_stock: of the same context and batch.
    """

    policy: str
    runtime: str
    context: int
    batch: int
    threads: int
    steps: int
    ms_per_token: float
    ms_fast: float
    ms_slow: float
    bytes: float
    ideal_ms: float | None = None
    share_of_ceiling: float | None = None
    speedup_over_stock: float | None = None


@dataclass(frozen=True, slots=True)
class ServingJob:
    """Checked settings of `saccade bench serve`."""

    shape: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    threads: int
    policies: tuple[Policy, ...]
    steps: int
    block: int
    dtype: torch.dtype
    json_file: Path | None
    notes: tuple[str, ...]

    @classmethod
    def check(
        cls,
        *,
        shape: str,
        contexts: str,
        batches: str,
        threads: int,
        policies: list[str],
        budgets: str,
        steps: int,
        block: int,
        dtype: str,
        json: Path | None,
    ) -> ServingJob:
        """Read the settings; stock vLLM is always measured, and an empty context, from which the ceiling is counted.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        config = read_config(shape)
        chosen, said = resolve_all(policies, shape, lambda: shape_of(config))
        compared, notes = at_budgets(chosen, parse_budgets(budgets))
        if dtype not in DTYPES:
            raise SaccadeError(f"unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
        if block % 16:
            raise SaccadeError(f"block={block} is not valid: a multiple of 16, vLLM's unit")
        made = cls(
            shape=shape,
            contexts=tuple(dict.fromkeys((EMPTY, *whole_numbers("context", contexts, at_least=1)))),
            batches=whole_numbers("batch", batches, at_least=1),
            threads=threads,
            # Stock is the dense baseline here; ours is measured if it was asked for.
            policies=tuple(one for one in compared if str(one) != "dense" or "dense" in policies),
            steps=steps,
            block=block,
            dtype=DTYPES[dtype],
            json_file=json,
            notes=(*said, *notes),
        )
        for policy in made.policies:
            if policy.rectify is not None:
                raise SaccadeError(f"{policy}: bench serve times single steps; add rectify=none")
            selector = policy.plan(shape_of(config)).selector
            page = None if selector is None else selector.bounds_page
            if page is not None and block % page:
                raise SaccadeError(
                    f"{policy}: block={block} is no multiple of its page={page}; pass --block {lcm(page, 16)}"
                )
        if json is not None:
            check_file(json)
        return made

    @property
    def units(self) -> int:
        """Measurements to make, one per context and batch."""
        return len(self.contexts) * len(self.batches)

    def run(self, on_unit: Callable[[str], None]) -> dict[str, Any]:
        """Measure everything; after every measurement the JSON file holds all rows so far."""
        prepare_process()
        torch.set_num_threads(self.threads)
        device = torch.device("cpu")
        results: dict[str, Any] = {
            "shape": self.shape,
            "rows": [],
            "environment": environment(threads=self.threads, dtype=self.dtype, device=device),
        }
        with tempfile.TemporaryDirectory() as folder:
            engines = self._engines(folder)
            for context, batch in product(self.contexts, self.batches):
                times = self._measure(engines, context, batch)
                results["rows"] += [asdict(row) for row in self._rows(times, context, batch)]
                _complete(results["rows"], results["environment"]["read_bandwidth_gb_s"])
                on_unit(f"context {context}, batch {batch}")
                if self.json_file is not None:
                    write_json(self.json_file, results)
            for engine in engines.values():
                engine.close()
        return results

    def _engines(self, folder: str) -> dict[str, SyntheticEngine]:
        config = read_config(self.shape)
        longest = max(self.contexts) + 4 * (self.steps + 2 * TURN)
        config.max_position_embeddings = max(config.max_position_embeddings, 2 * longest)
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        shape = shape_of(config)
        rows = max(self.batches)
        sizes = {
            "tokens": rows * -(-longest // self.block) * self.block,
            "rows": rows,
            "block": self.block,
            "bytes_per_token": 2 * shape.layers * shape.kv_heads * shape.head_dim * self.dtype.itemsize,
        }
        dtype = str(self.dtype).removeprefix("torch.")
        kinds: dict[str, ServeOptions | None] = {STOCK: None}
        kinds |= {str(policy): ServeOptions(policy) for policy in self.policies}
        return {name: SyntheticEngine(folder, options, dtype=dtype, **sizes) for name, options in kinds.items()}

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

    def _rows(self, times: dict[str, list[float]], context: int, batch: int) -> list[ServingRow]:
        rows = []
        for name, taken in times.items():
            fast, median, slow = (1e3 * value for value in statistics.quantiles(taken, n=4))
            policy = next((policy for policy in self.policies if str(policy) == name), None)
            total = self._cost(policy, context, batch).total
            rows.append(ServingRow(name, "vllm", context, batch, self.threads, len(taken), median, fast, slow, total))
        return rows

    def _cost(self, policy: Policy | None, context: int, batch: int) -> Cost:
        """Bytes of a step; without a policy of a dense one."""
        config = read_config(self.shape)
        shape = shape_of(config)
        plan = (policy or Policy.from_spec("dense")).plan(shape)
        size = self.dtype.itemsize
        return cost_of(
            plan, None, shape, context=context, batch=batch, kv_itemsize=size, weight_bytes=_weights(config) * size
        )


def _weights(config: Any) -> int:
    """Numbers that a step reads: all but an untied input embedding."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total: int = sum(parameter.numel() for parameter in model.parameters())
    return total if config.tie_word_embeddings else total - int(model.get_input_embeddings().weight.numel())


def _complete(rows: list[dict[str, Any]], bandwidth: float) -> None:
    """Fill in what compares with other rows of the same batch."""
    for row in rows:
        stock = {
            other["context"]: other for other in rows if other["policy"] == STOCK and other["batch"] == row["batch"]
        }
        empty, same = stock.get(EMPTY), stock.get(row["context"])
        if same is not None:
            row["speedup_over_stock"] = same["ms_per_token"] / row["ms_per_token"]
        if empty is not None:
            row["ideal_ms"] = empty["ms_per_token"] + (row["bytes"] - empty["bytes"]) / bandwidth / 1e6
            row["share_of_ceiling"] = row["ideal_ms"] / row["ms_per_token"]
