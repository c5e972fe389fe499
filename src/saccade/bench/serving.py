"""Time per output token of vLLM: as it comes and under policies, at contexts that nobody prefilled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import Any, ClassVar

from ..checkpoints.load import skeleton_of
from ..checkpoints.traffic import state_bytes, weights_read
from ..errors import SaccadeError
from ..methods.policy import Policy
from ..plans.cost import cost_of
from .engines import CHUNK, EngineJob, EngineSettings
from .grid import Grid, parse_points
from .rows import ServingRow, compared, quartiles
from .synthetic import SyntheticEngine
from .variants import DENSE, STOCK_AGAIN

EMPTY = 16
"""Tokens that stand for an empty context: a request cannot have none."""

SPARE = 512
"""Tokens that rows may decode while others of their batch arrive."""


@dataclass(frozen=True, slots=True)
class ServingSettings(EngineSettings):
    """What the user can choose; see `saccade bench serve --help`."""

    points: Sequence[str] = ()
    max_model_len: int | None = None
    adaptive: bool = False


@dataclass(frozen=True, slots=True)
class ServingJob(EngineJob[tuple[int, int]]):
    """Checked settings; an empty context, from which the ceiling is counted, is always measured.

    Attributes:
        points: contexts and batches, those of an empty context first.
        warm, turn: steps that do not count before the first turn, and those that an engine of a group takes in a turn.
        room: tokens that a row may decode, those before the first turn and while others arrive counted.
        periods: of rectified policies, which are timed in whole ones: the tokens after which a dense pass comes again.
        drafts: of policies that are verified, the most that a cycle has.
    """

    row: ClassVar[type[Any]] = ServingRow
    settings: ServingSettings
    warm: int
    turn: int
    steps: int
    room: int
    periods: Mapping[str, int]
    drafts: Mapping[str, int]

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
        block, policies, notes = settings.check(grid)
        rectified = {name: policy.rectify for name, policy in policies.items() if policy is not None and policy.rectify}
        if rectified and not grid.served:
            raise SaccadeError(
                f"{next(iter(rectified))}: on a CPU engines take turns of a few steps, of which dense passes are no "
                "whole number; add rectify=none"
            )
        steps = settings.steps or (64 if grid.served else 12)
        warm, turn = (8, steps) if grid.served else (1, 3)
        drafts = {name: rectify.every for name, rectify in rectified.items() if rectify.mode == "verify"}
        if settings.adaptive and not drafts:
            raise SaccadeError("adaptive is valid only beside drafts: add --drafts 8")
        if drafts and settings.rectify_together:
            raise SaccadeError("rectify-together is valid only without drafts, which vLLM verifies as it comes to them")
        periods = {name: rectify.every + 1 for name, rectify in rectified.items() if name not in drafts}
        most = max([0, *drafts.values()])
        rate = 1.0 if settings.draft_rate is None else settings.draft_rate
        # What a row gains a cycle by chance; a quarter more over all cycles is out of reach.
        gained = min(1.25 * sum(rate**number for number in range(most + 1)), most + 1)
        room = ceil((warm + 2 * steps) * gained) + SPARE * (1 + bool(drafts))
        room += 2 * max(periods.values(), default=0)
        need = max(context for context, _ in points) + room
        longest = settings.max_model_len or need
        if longest < need:
            told = f"max-model-len={longest} has no room for a context of {need - room} tokens"
            raise SaccadeError(f"{told} and the {room} that may be decoded: at least {need}")
        groups: tuple[tuple[str, ...], ...] = (tuple(policies),)
        if grid.served:
            groups = tuple((name,) for name in (*policies, STOCK_AGAIN))
        sizes = longest, warm, turn, steps, room
        return cls(grid, notes, settings, policies, points, groups, block, *sizes, periods, drafts)

    @property
    def most(self) -> int:
        return max(batch for _, batch in self.points)

    def start(self, policy: Policy | None, settings: dict[str, Any]) -> SyntheticEngine:
        given = {name: getattr(self.settings, name) for name in ("draft_rate", "adaptive")}
        return SyntheticEngine(self.settings.served(policy), **{"max_num_batched_tokens": CHUNK, **given, **settings})

    def blocks(self, point: tuple[int, int]) -> int:
        context, batch = point
        return self.blocks_of(context + self.room, batch)

    def said(self, point: tuple[int, int]) -> str:
        return "context {}, batch {}".format(*point)

    def compare(self, rows: Sequence[ServingRow], bandwidth: float) -> list[ServingRow]:
        return compared(rows, EMPTY, bandwidth)

    def _time(self, engines: Mapping[str, SyntheticEngine], context: int, batch: int) -> dict[str, list[float]]:
        """Seconds of each engine's steps, taken in turns; the first of a turn warms the caches and is not timed.

        Of a rectified policy of its periods, by step; of one that is verified of its cycles.
        """
        times: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.begin(context, batch)
            for _ in range(self.warm):
                engine.round()
        for done in range(0, self.steps, self.turn):
            for name, engine in engines.items():
                count = min(self.turn, self.steps - done)
                period = self.periods.get(name, 1)
                ends = [engine.round() for _ in range(1 + -(-count // period) * period)]
                # Of a rectified policy the mean of a whole period, in which every row has one dense pass.
                times[name] += [(end - begin) / period for begin, end in pairwise(ends[::period])]
        for engine in engines.values():
            engine.end()
        return times

    def measure(self, engines: Mapping[str, SyntheticEngine], point: tuple[int, int]) -> list[ServingRow]:
        """One row per engine; stock reads what a dense policy does."""
        (context, batch), grid, rows = point, self.grid, []
        times = self._time(engines, context, batch)
        model = skeleton_of(grid.config, grid.name)
        weights = weights_read(model, batch) * grid.dtype.itemsize
        if self.settings.quantization:
            head = model.get_output_embeddings().weight.numel() * grid.dtype.itemsize
            weights = head + (weights - head) / grid.dtype.itemsize
        size: dict[str, Any] = {"context": context, "batch": batch, "kv_itemsize": self.itemsize}
        size |= {"weight_bytes": weights, "state_bytes": state_bytes(grid.config, grid.dtype)}
        for name, taken in times.items():
            steps = len(taken) * self.periods.get(name, 1)
            adapts = self.settings.adaptive and name in self.drafts
            policy = (None if adapts else self.policies.get(name)) or DENSE
            fast, median, slow = quartiles(taken)
            cycle = 1e3 * fmean(taken) if adapts else median  # of all lengths, those that were tried too
            gained = engines[name].gained if name in self.drafts else None
            tokens = gained or 1.0
            size["acceptance"] = (tokens - 1) / self.drafts.get(name, 1)
            cost = cost_of(policy.plan(grid.shape), policy.rectify, grid.shape, **size)
            rows.append(
                ServingRow(
                    policy=name, runtime="vllm", context=context, batch=batch, threads=max(grid.threads),
                    steps=steps, ms_per_token=cycle / tokens, ms_fast=fast / tokens, ms_slow=slow / tokens,
                    bytes=cost.total, tokens_per_cycle=gained, ms_loop=1e3 * engines[name].pace / tokens,
                )
            )  # fmt: skip
        return rows
