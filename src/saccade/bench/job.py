"""A benchmark as the user asked for it: checked before any work, one measurement after the other, written as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.load import DTYPES, pick_device
from ..checkpoints.presets import random_model, read_config
from ..checkpoints.shape import shape_of
from ..errors import SaccadeError
from ..eval.entry import at_budgets, parse_budgets
from ..eval.output import check_file, whole_numbers, write_json
from ..machine import environment
from ..methods.policy import Policy
from ..recipes.resolve import resolve_all
from . import baselines
from .decode import measure

ROOM = 256
"""Positions behind the longest context: a rectified policy decodes a whole period."""


@dataclass(frozen=True, slots=True)
class BenchJob:
    """Checked settings of `saccade bench decode`."""

    shape: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    policies: tuple[Policy, ...]
    steps: int
    baselines: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    json_file: Path | None
    notes: tuple[str, ...]

    @classmethod
    def check(
        cls,
        *,
        shape: str,
        contexts: list[str],
        batches: list[str],
        threads: list[str],
        policies: list[str],
        budgets: list[str],
        steps: int,
        baseline: list[str],
        dtype: str,
        device: str,
        json: Path | None,
    ) -> BenchJob:
        """Read the settings; dense is always measured, since every speed is quoted against it.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        config = read_config(shape)
        # The weights are random ones: a recipe is held against the sizes.
        chosen, said = resolve_all(policies, shape, lambda: shape_of(config))
        compared, notes = at_budgets(chosen, parse_budgets(",".join(budgets)))
        if dtype not in DTYPES:
            raise SaccadeError(f"unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
        picked = pick_device(device)
        names, left_out = baselines.choose(baseline, picked, shape_of(config).head_dim)
        made = cls(
            shape=shape,
            contexts=whole_numbers("context", ",".join(contexts), at_least=0),
            batches=whole_numbers("batch", ",".join(batches), at_least=1),
            threads=whole_numbers("threads", ",".join(threads), at_least=1),
            policies=compared,
            steps=steps,
            baselines=names,
            dtype=DTYPES[dtype],
            device=picked,
            json_file=json,
            notes=(*said, *notes, *left_out),
        )
        for policy in made.policies:
            if policy.rectify is not None and policy.rectify.mode == "verify":
                raise SaccadeError(
                    f"{policy}: how many drafts stand depends on the text, and random keys have none; "
                    f"use rectify={policy.rectify.every}"
                )
            policy.plan(shape_of(config))
        if json is not None:
            check_file(json)
        return made

    @property
    def units(self) -> int:
        """Measurements to make, one per context, batch and number of threads."""
        return len(self.contexts) * len(self.batches) * len(self.threads)

    def run(self, on_unit: Callable[[str], None]) -> dict[str, Any]:
        """Measure everything; after every measurement the JSON file holds all rows so far."""
        model = random_model(self.shape, positions=max(self.contexts) + ROOM, dtype=self.dtype, device=self.device)
        torch.set_num_threads(max(self.threads))
        results: dict[str, Any] = {
            "shape": self.shape,
            "rows": [],
            "environment": environment(threads=max(self.threads), dtype=self.dtype, device=self.device),
        }
        results["environment"]["bandwidths"] = []
        for context, batch, threads in product(self.contexts, self.batches, self.threads):
            rows, bandwidth = measure(
                model,
                self.policies,
                context=context,
                batch=batch,
                threads=threads,
                steps=self.steps,
                names=self.baselines,
            )
            results["rows"] += [asdict(row) for row in rows]
            setting = {"context": context, "batch": batch, "threads": threads}
            results["environment"]["bandwidths"].append({**setting, "read_gb_s": round(bandwidth, 1)})
            on_unit(f"context {context}, batch {batch}, threads {threads}")
            if self.json_file is not None:
                write_json(self.json_file, results)
        return results
