"""A benchmark as the user asked for it: checked before any work, one measurement after the other, written as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..adapters.hf.load import DTYPES, pick_device
from ..adapters.hf.support import shape_of
from ..errors import SaccadeError
from ..eval.entry import make_entries, parse_budgets
from ..eval.output import check_file, whole_numbers, write_json
from ..machine import environment
from ..spec import Policy
from .decode import measure
from .shapes import random_model, read_config


@dataclass(frozen=True, slots=True)
class BenchJob:
    """Checked settings of `saccade bench decode`."""

    shape: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    policies: tuple[Policy, ...]
    steps: int
    stock: bool
    dtype: torch.dtype
    device: torch.device
    json_file: Path | None
    notes: tuple[str, ...]

    @classmethod
    def check(
        cls,
        *,
        shape: str,
        contexts: str,
        batches: str,
        threads: str,
        policies: list[str],
        budgets: str,
        steps: int,
        stock: bool,
        dtype: str,
        device: str,
        json: Path | None,
    ) -> BenchJob:
        """Read the settings; dense is always measured, since every speed is quoted against it.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        entries, notes = make_entries(policies, parse_budgets(budgets))
        config = read_config(shape)
        if dtype not in DTYPES:
            raise SaccadeError(f"unknown dtype {dtype!r}; valid: {', '.join(DTYPES)}")
        made = cls(
            shape=shape,
            contexts=whole_numbers("context", contexts, at_least=0),
            batches=whole_numbers("batch", batches, at_least=1),
            threads=whole_numbers("threads", threads, at_least=1),
            policies=tuple(entry.policy for entry in entries),
            steps=steps,
            stock=stock,
            dtype=DTYPES[dtype],
            device=pick_device(device),
            json_file=json,
            notes=notes,
        )
        for policy in made.policies:
            if policy.rectify is not None:
                raise SaccadeError(
                    f"{policy}: bench decode times single steps, which leaves the dense passes of "
                    f"rectify={policy.rectify} out; add rectify=none (`saccade policies --cost` counts the passes)"
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
        model = random_model(self.shape, positions=max(self.contexts) + 1, dtype=self.dtype, device=self.device)
        torch.set_num_threads(max(self.threads))
        results: dict[str, Any] = {
            "shape": self.shape,
            "rows": [],
            "environment": environment(threads=max(self.threads), dtype=self.dtype, device=self.device),
        }
        for context, batch, threads in product(self.contexts, self.batches, self.threads):
            results["rows"] += measure(
                model,
                list(self.policies),
                context=context,
                batch=batch,
                threads=threads,
                steps=self.steps,
                stock=self.stock,
            )
            on_unit(f"context {context}, batch {batch}, threads {threads}")
            if self.json_file is not None:
                write_json(self.json_file, results)
        return results
