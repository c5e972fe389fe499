"""One timing of a decoding step, and what it means beside the other timings of the same setting."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .clock import PARTS
from .variants import Step, Variant


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One variant at one setting; times are milliseconds per output token of the whole batch.

    Attributes:
        policy: spec, or `stock`.
        runtime: whose attention and cache: `transformers`, `saccade`, `torch-sdpa` or `vllm` (`bench.baselines`).
        context, batch, threads: cached tokens per row, rows, CPU threads.
        steps: timed calls.
        ms_per_token: median call; with rectification also a dense pass's share. `ms_fast`, `ms_slow`: the quartiles.
        ms_selection: choosing sets: scores that attention does not make anyway, top-k, publishing.
        ms_attention: attention, the scores that it keeps included.
        ms_index: upkeep of what is searched.
        ms_rectify: a dense pass's time beyond a plain step, divided by the tokens of its period.
        ms_other: all the rest: weights, norms, Python. Parts are None where they were not measured.
        bytes: moved per step by the cost model, weights included.
        share_attended: of the cached tokens, mean over layers and heads.
        index_bytes, build_seconds: of the indexes at this context.
        ideal_ms: the fastest dense decoder's time at an empty context, and the bytes that are not weights at the
            bandwidth measured in the same run.
        share_of_ceiling: `ideal_ms / ms_per_token`.
        speedup_over_stock, speedup_over_best_dense: of the same setting; None where there is no such row.
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
    ms_selection: float | None
    ms_attention: float | None
    ms_index: float | None
    ms_rectify: float | None
    ms_other: float | None
    bytes: float
    share_attended: float
    index_bytes: int
    build_seconds: float
    ideal_ms: float | None = None
    share_of_ceiling: float | None = None
    speedup_over_stock: float | None = None
    speedup_over_best_dense: float | None = None


def row_of(variant: Variant, threads: int, step_bytes: float, index_bytes: int, build_seconds: float) -> DecodeRow:
    """Medians of a variant's steps."""
    plain = [step for step in variant.steps if not step.passes]
    fast, median, slow = (1e3 * value for value in statistics.quantiles([step.seconds for step in plain], n=4))
    parts: dict[str, float | None] = dict.fromkeys(PARTS)
    other: float | None = None
    if plain[0].parts:
        parts |= {part: 1e3 * statistics.median(step.parts[part] for step in plain) for part in PARTS}
        other = 1e3 * statistics.median(step.seconds - sum(step.parts.values()) for step in plain)
    passes = [step for step in variant.steps if step.passes]
    rectify: float | None = 0.0 if other is not None else None
    if passes:
        rectify = (1e3 * statistics.median(step.seconds for step in passes) - median) / variant.period
    share = rectify or 0.0
    return DecodeRow(
        policy=variant.policy,
        runtime=variant.runtime,
        context=variant.context,
        batch=variant.batch,
        threads=threads,
        steps=len(variant.steps),
        ms_per_token=median + share,
        ms_fast=fast + share,
        ms_slow=slow + share,
        ms_selection=parts["selection"],
        ms_attention=parts["attention"],
        ms_index=parts["index"],
        ms_rectify=rectify,
        ms_other=other,
        bytes=step_bytes,
        share_attended=variant.share_attended,
        index_bytes=index_bytes,
        build_seconds=build_seconds,
    )


def complete(rows: Iterable[DecodeRow], *, empty_ms: float, weight_bytes: float, bandwidth: float) -> list[DecodeRow]:
    """Rows of one setting with what compares them.

    Args:
        rows: all variants of one context, batch and number of threads.
        empty_ms: of the fastest dense decoder without a cache.
        weight_bytes: of a step.
        bandwidth: GB/s.
    """
    rows = list(rows)
    stock = _fastest(row for row in rows if row.runtime == "transformers")
    dense = _fastest(row for row in rows if row.policy in ("stock", "dense"))
    return [_compared(row, stock, dense, empty_ms + (row.bytes - weight_bytes) / bandwidth / 1e6) for row in rows]


def _fastest(rows: Iterable[DecodeRow]) -> float | None:
    return min((row.ms_per_token for row in rows), default=None)


def _compared(row: DecodeRow, stock: float | None, dense: float | None, ideal: float) -> DecodeRow:
    return replace(
        row,
        ideal_ms=ideal,
        share_of_ceiling=ideal / row.ms_per_token,
        speedup_over_stock=None if stock is None else stock / row.ms_per_token,
        speedup_over_best_dense=None if dense is None else dense / row.ms_per_token,
    )


def median_ms(steps: Sequence[Step]) -> float:
    return 1e3 * statistics.median(step.seconds for step in steps)
