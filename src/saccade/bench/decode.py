"""Time per decoded token on a synthetic cache: dense decoders and policies, interleaved."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..checkpoints.shape import parameters_read, shape_of
from ..errors import SaccadeError
from ..machine import read_bandwidth
from ..methods.policy import Policy
from ..plans.cost import cost_of
from . import baselines
from .rows import DecodeRow, complete, row_of
from .variants import Attached, Memory, Variant

TURN = 3
"""Timed steps a variant takes before the next one has its turn."""

DENSE = Policy.from_spec("dense")


def measure(
    model: PreTrainedModel,
    policies: Sequence[Policy],
    *,
    context: int,
    batch: int,
    threads: int,
    steps: int,
    names: Sequence[str],
) -> tuple[list[DecodeRow], float]:
    """Time decode steps at `context` cached tokens; the variants take turns of `TURN` steps until each has `steps`.

    Among them are dense decoders without a cache, from which the ceiling is counted, and a reading of the memory's
    bandwidth. The cache holds random keys and values: no prefill is run. After a turn it is cropped back.

    Args:
        model: stock, with `sdpa` attention.
        policies: what is timed; dense belongs to them.
        context, batch, threads: the setting; torch has that many threads.
        steps: timed calls of each variant; a rectified policy takes two whole periods.
        names: baselines.

    Returns:
        Rows, and the read bandwidth in GB/s.

    Raises:
        SaccadeError: if attention differs from float64, or a dense decoder's logits from the stock model's.
    """
    longest = max(policy.phase.period for policy in policies) + 1
    variants = _variants(model, policies, Memory(model, context, batch, longest), names)
    empty = _variants(
        model, [DENSE], Memory(model, 0, batch, longest), [name for name in names if name == baselines.STOCK]
    )
    for variant in (*variants, *empty):
        variant.turn(0)
    _check([variant for variant in variants if variant.plan is None or variant.plan.selector is None])
    bandwidth = []
    for done in range(0, steps, TURN):
        count = min(TURN, steps - done)
        for variant in (*variants, *empty):
            if variant.rectify is None:
                variant.turn(count)
            elif not variant.steps:
                # Two whole periods at once: quartiles want two plain steps.
                variant.turn(2 * variant.phase.period)
        bandwidth.append(read_bandwidth(model.device, repeats=1))
    weight_bytes = parameters_read(model) * model.dtype.itemsize
    rows = [row_of(variant, threads, _bytes(variant, model, weight_bytes)) for variant in variants]
    speed = statistics.median(bandwidth)
    least = min(1e3 * statistics.median(step.seconds for step in variant.steps) for variant in empty)
    for variant in (*variants, *empty):
        variant.close()
    gc.collect()
    return complete(rows, empty_ms=least, empty_bytes=weight_bytes, bandwidth=speed), speed


def _variants(
    model: PreTrainedModel, policies: Sequence[Policy], memory: Memory, names: Sequence[str]
) -> list[Variant]:
    made: list[Variant] = []
    for name in names:
        if name == baselines.STOCK:
            made.append(Variant(model, memory))
        else:
            made.append(
                Attached(model, memory, DENSE, baselines.operations(name, memory.context, memory.batch), label=name)
            )
    return [*made, *(Attached(model, memory, policy) for policy in policies)]


def _bytes(variant: Variant, model: PreTrainedModel, weight_bytes: float) -> float:
    """What a step moves, by the cost model."""
    shape = shape_of(model.config)
    return cost_of(
        DENSE.plan(shape) if variant.plan is None else variant.plan,
        variant.rectify,
        shape,
        context=variant.context,
        batch=variant.batch,
        kv_itemsize=model.dtype.itemsize,
        weight_bytes=weight_bytes,
    ).total


def _check(dense: Sequence[Variant]) -> None:
    """A variant that attends to everything must reproduce the first such variant's logits."""
    for variant in dense[1:]:
        assert variant.logits is not None and dense[0].logits is not None
        error = (variant.logits.float() - dense[0].logits.float()).norm() / dense[0].logits.float().norm()
        # Two roundings per layer of the residual stream, each half a unit in the last place, add up at worst linearly.
        budget = 2 * variant.model.config.num_hidden_layers * torch.finfo(variant.model.dtype).eps / 2
        if error > budget:
            raise SaccadeError(
                f"{variant.policy} on {variant.runtime} differs from {dense[0].policy} on {dense[0].runtime} by "
                f"{error:.2e} of the logits' norm (budget {budget:.2e}); a wrong result is not timed"
            )
