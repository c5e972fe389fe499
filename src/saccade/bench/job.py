"""`saccade bench decode` as the user asked for it: checked before any work, one measurement after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.presets import random_model
from ..errors import SaccadeError
from ..methods.policy import Policy
from . import baselines
from .decode import measure
from .grid import Grid, GridJob, OnUnit, PolicySettings
from .rows import DecodeRow

ROOM = 256
"""Positions behind the longest context: a rectified policy decodes a whole period."""


@dataclass(frozen=True, slots=True)
class BenchSettings(PolicySettings):
    """What the user can choose; see `saccade bench decode --help`."""

    baselines: Sequence[str]


@dataclass(frozen=True, slots=True)
class BenchJob(GridJob):
    """Checked settings; dense is always among the policies, since every speed is quoted against it."""

    policies: tuple[Policy, ...]
    steps: int
    baselines: tuple[str, ...]

    @classmethod
    def check(cls, settings: BenchSettings) -> BenchJob:
        """Read the settings.

        Raises:
            SaccadeError: one line about the first setting that is not valid.
        """
        grid = Grid.check(settings, shortest=0)
        policies, notes = settings.resolve(grid.shape)
        for policy in policies:
            if policy.rectify is not None and policy.rectify.mode == "verify":
                raise SaccadeError(
                    f"{policy}: how many drafts stand depends on the text, and random keys have none; "
                    f"use rectify={policy.rectify.every}"
                )
        names, left_out = baselines.choose(settings.baselines, grid.device, grid.shape.head_dim)
        return cls(grid, (*notes, *left_out), policies, settings.steps, names)

    def run(self, on_unit: OnUnit) -> dict[str, Any]:
        grid = self.grid
        model = random_model(grid.name, positions=max(grid.contexts) + ROOM, dtype=grid.dtype, device=grid.device)
        results = grid.results()
        bandwidths = results["environment"]["bandwidths"] = []

        def measured(context: int, batch: int, threads: int) -> list[DecodeRow]:
            setting = {"context": context, "batch": batch, "threads": threads}
            rows, bandwidth = measure(model, self.policies, **setting, steps=self.steps, names=self.baselines)
            bandwidths.append({**setting, "read_gb_s": round(bandwidth, 1)})
            return rows

        return grid.run(results, measured, on_unit)
