"""One timing of a decoding step, and what it means beside the other timings of the same setting."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..eval.output import grouped
from .clock import PARTS
from .variants import STOCK, STOCK_AGAIN, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant at one setting; times are milliseconds per output token of the whole batch.

    Attributes:
        policy: spec, or `stock`.
        runtime: whose attention and cache: `saccade`, or a baseline's name.
        context, batch, threads: cached tokens per row, rows, CPU threads.
        steps: timed calls.
        ms_per_token: median call; with rectification also a dense pass's share, or of periods' means the median.
            `ms_fast`, `ms_slow`: the quartiles.
        bytes: moved per step by the cost model, weights included.
        ideal_ms: the fastest dense decoder's time at an empty context, and the bytes beyond its own at the bandwidth
            measured in the same run.
        share_of_ceiling: `ideal_ms / ms_per_token`.
        speedup_over_stock: of the same setting; None where there is no such row.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow(Row):
    """A row of `saccade bench decode`.

    Attributes:
        ms_selection: choosing sets: scores that attention does not make anyway, top-k, publishing.
        ms_attention: attention, the scores that it keeps included.
        ms_index: upkeep of what is searched.
        ms_rectify: a dense pass's time beyond a plain step, divided by the tokens of its period.
        ms_other: all the rest: weights, norms, Python. Parts are None where they were not measured.
        share_attended: of the cached tokens, mean over layers and heads.
        index_bytes, build_seconds: of the indexes at this context.
        speedup_over_best_dense: of the same setting.
    """

    ms_selection: float | None
    ms_attention: float | None
    ms_index: float | None
    ms_rectify: float | None
    ms_other: float | None
    share_attended: float
    index_bytes: int
    build_seconds: float
    speedup_over_best_dense: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow(Row):
    """A row of `saccade bench serve`.

    Attributes:
        drift: of stock's time at this setting between the first engine and the last, as a share; None: it ran once.
        void: the drift is more than `DRIFT`, and nothing can be compared.
        tokens_per_cycle: what a row gains by drafts and the pass that verifies them.
        ms_loop: mean time of a token in vLLM's loop since the rows have come, those included that warm up and slow
            ones; None: of a run before there was such a figure.
    """

    drift: float | None = None
    void: bool = False
    tokens_per_cycle: float | None = None
    ms_loop: float | None = None

    @property
    def point(self) -> tuple[int, int]:
        """What tells rows of one engine apart."""
        return self.context, self.batch


DRIFT = 0.02
"""Most that stock may differ from itself before a setting is void."""

AnyRow = TypeVar("AnyRow", bound=Row)


def quartiles(seconds: Sequence[float], unit: float = 1e3) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile in so many units a second; of one time thrice that, of none zeros."""
    if len(seconds) < 2:
        return (unit * sum(seconds),) * 3
    fast, median, slow = (unit * value for value in statistics.quantiles(seconds, n=4))
    return fast, median, slow


def row_of(variant: Variant, threads: int, step_bytes: float) -> DecodeRow:
    """Medians of a variant's steps."""
    plain = [step for step in variant.steps if not step.passes]
    fast, median, slow = quartiles([step.seconds for step in plain])
    parts: dict[str, float | None] = dict.fromkeys((*PARTS, "other", "rectify"))
    if plain[0].parts:
        parts |= {part: 1e3 * statistics.median(step.parts[part] for step in plain) for part in PARTS}
        parts["other"] = 1e3 * statistics.median(step.seconds - sum(step.parts.values()) for step in plain)
        parts["rectify"] = 0.0
    passes = [step.seconds for step in variant.steps if step.passes]
    if passes:
        parts["rectify"] = (1e3 * statistics.median(passes) - median) / variant.phase.period
    share = parts["rectify"] or 0.0
    figures: dict[str, Any] = {name: getattr(variant, name) for name in ("policy", "runtime", "context", "batch")}
    figures |= {f"ms_{part}": value for part, value in parts.items()}
    figures |= {"ms_per_token": median + share, "ms_fast": fast + share, "ms_slow": slow + share}
    return DecodeRow(**figures, **variant.figures(), threads=threads, steps=len(variant.steps), bytes=step_bytes)


def complete(rows: Sequence[AnyRow], *, empty_ms: float, empty_bytes: float, bandwidth: float) -> list[AnyRow]:
    """Rows of one setting with what compares them.

    Args:
        rows: all variants of one context, batch and number of threads.
        empty_ms, empty_bytes: of a step of the fastest dense decoder without a cache.
        bandwidth: GB/s.
    """
    stock = _fastest(row for row in rows if row.policy == STOCK)
    dense = _fastest(row for row in rows if row.policy in (STOCK, "dense"))
    completed = []
    for row in rows:
        ideal = empty_ms + (row.bytes - empty_bytes) / bandwidth / 1e6
        more: dict[str, Any] = {"speedup_over_stock": None if stock is None else stock / row.ms_per_token}
        if isinstance(row, DecodeRow):
            more["speedup_over_best_dense"] = None if dense is None else dense / row.ms_per_token
        completed.append(replace(row, ideal_ms=ideal, share_of_ceiling=ideal / row.ms_per_token, **more))
    return completed


def compared(rows: Sequence[ServingRow], empty: int, bandwidth: float) -> list[ServingRow]:
    """Rows of all settings, by setting, with what compares them; stock's time is the mean of its rows.

    Args:
        empty: the context from which the ceiling is counted; stock's row of every batch is there.
        bandwidth: GB/s.
    """
    settings = grouped(rows, lambda row: row.point)
    stock = {key: [row for row in held if row.policy in (STOCK, STOCK_AGAIN)] for key, held in settings.items()}
    completed = []
    for (context, batch), held in settings.items():
        floor, here = stock[empty, batch], [row.ms_per_token for row in stock[context, batch]]
        empty_ms = statistics.fmean(row.ms_per_token for row in floor)
        drift = here[-1] / here[0] - 1 if len(here) > 1 else None
        void = drift is not None and abs(drift) > DRIFT
        for row in complete(held, empty_ms=empty_ms, empty_bytes=floor[0].bytes, bandwidth=bandwidth):
            speedup = statistics.fmean(here) / row.ms_per_token if here else None
            completed += [replace(row, speedup_over_stock=speedup, drift=drift, void=void)]
    return completed


def _fastest(rows: Iterable[Row]) -> float | None:
    return min((row.ms_per_token for row in rows), default=None)
