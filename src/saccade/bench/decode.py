"""Time per decoded token on a synthetic cache: stock transformers and this engine's policies, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..adapters.hf.run import sparsify
from ..adapters.hf.support import shape_of
from ..errors import SaccadeError
from ..machine import synchronize
from ..spec import Policy

STOCK = "stock"
TURN = 3
"""Timed steps a variant takes before the next one has its turn."""


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One timing: medians over interleaved steps, in milliseconds per token of the whole batch.

    `ms_fast` and `ms_slow` are the lower and upper quartile; `speedup_over_stock` and `speedup_over_dense` compare
    with the rows of the same context, None where that row was not measured.
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
    share_attended: float | None
    speedup_over_stock: float | None = None
    speedup_over_dense: float | None = None


def measure(
    model: PreTrainedModel,
    policies: list[Policy],
    *,
    context: int,
    batch: int,
    threads: int,
    steps: int,
    stock: bool = True,
) -> list[dict[str, Any]]:
    """Time decode steps at `context` cached tokens; the variants take turns of `TURN` steps until each has `steps`.

    The cache holds random keys and values: no prefill is run. After every step it is cropped back. The first step of a
    turn is not timed: it warms the caches and builds the index that a policy keeps.

    Raises:
        SaccadeError: if a policy whose set covers the context does not reproduce stock logits.
    """
    torch.set_num_threads(threads)
    variants: list[_Variant] = [_Sparse(model, policy, context, batch) for policy in policies]
    if stock:
        variants.insert(0, _Stock(model, context, batch))
    for variant in variants:
        variant.turn(0)
    _check(variants)
    for done in range(0, steps, TURN):
        for variant in variants:
            variant.turn(min(TURN, steps - done))
    rows = [variant.row(context, batch, threads) for variant in variants]
    base = {row.policy: row.ms_per_token for row in rows}
    return [_with_speedups(row, base) for row in rows]


class _Variant:
    """Something that decodes one token at a fixed context, over and over."""

    label: str
    runtime: str

    def __init__(self, model: PreTrainedModel, context: int, batch: int) -> None:
        self.model = model
        self.context = context
        self.cache = synthetic_cache(model, context, batch)
        self.token = torch.full((batch, 1), 7, device=model.device)
        self.position = torch.full((batch, 1), context, device=model.device)
        self.times: list[float] = []
        self.logits: Tensor | None = None
        self.share: float | None = None

    def attached(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @torch.inference_mode()
    def turn(self, steps: int) -> None:
        """Decode `steps` timed tokens after an untimed one; attaching and cropping are not in the times."""
        with self.attached():
            self._step()
            self.times += [self._step() for _ in range(steps)]

    def _step(self) -> float:
        synchronize(self.model.device)
        start = time.perf_counter()
        output = self.model(self.token, past_key_values=self.cache, position_ids=self.position, use_cache=True)
        synchronize(self.model.device)
        elapsed = time.perf_counter() - start
        self.cache.crop(-1)
        self.logits = output.logits
        return elapsed

    def row(self, context: int, batch: int, threads: int) -> DecodeRow:
        fast, median, slow = (1e3 * value for value in statistics.quantiles(self.times, n=4))
        return DecodeRow(
            self.label, self.runtime, context, batch, threads, len(self.times), median, fast, slow, self.share
        )


class _Stock(_Variant):
    label = STOCK
    runtime = "transformers"

    def __init__(self, model: PreTrainedModel, context: int, batch: int) -> None:
        super().__init__(model, context, batch)
        self.share = 1.0


class _Sparse(_Variant):
    runtime = "saccade"

    def __init__(self, model: PreTrainedModel, policy: Policy, context: int, batch: int) -> None:
        super().__init__(model, context, batch)
        self.policy = policy
        self.label = str(policy)

    @contextmanager
    def attached(self) -> Iterator[None]:
        with sparsify(self.model, self.policy) as run, run.decoding():
            yield
            self.share = run.stats().share_attended


def synthetic_cache(model: PreTrainedModel, context: int, batch: int) -> DynamicCache:
    """A stock cache of `context` random tokens; the seed is fixed, so that every variant sees the same one."""
    shape = shape_of(model.config)
    generator = torch.Generator(model.device).manual_seed(0)
    size = (batch, shape.kv_heads, context, shape.head_dim)
    cache = DynamicCache()
    for _ in range(shape.layers if context else 0):
        layer = DynamicLayer()
        keys, values = (torch.empty(size, dtype=model.dtype, device=model.device) for _ in range(2))
        for tensor in (keys, values):
            tensor.normal_(generator=generator)
        layer.update(keys, values)
        cache.layers.append(layer)
    return cache


def _check(variants: list[_Variant]) -> None:
    """A variant that attends to everything must reproduce the first such variant's logits."""
    exact = [variant for variant in variants if variant.share == 1.0 and variant.logits is not None]
    for variant in exact[1:]:
        assert variant.logits is not None and exact[0].logits is not None
        error = (variant.logits.float() - exact[0].logits.float()).norm() / exact[0].logits.float().norm()
        # Two roundings per layer of the residual stream, each half a unit in the last place, add up at worst linearly.
        budget = 2 * variant.model.config.num_hidden_layers * torch.finfo(variant.model.dtype).eps / 2
        if error > budget:
            raise SaccadeError(
                f"{variant.label} differs from {exact[0].label} by {error:.2e} of the logits' norm "
                f"(budget {budget:.2e}); a wrong result is not timed"
            )


def _with_speedups(row: DecodeRow, base: dict[str, float]) -> dict[str, Any]:
    over = {"speedup_over_stock": base.get(STOCK), "speedup_over_dense": base.get("dense")}
    ratios = {name: time / row.ms_per_token if time else None for name, time in over.items()}
    return {**asdict(row), **ratios}
