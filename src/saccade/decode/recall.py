"""How much of dense attention a chosen set holds: its softmax mass, and its own best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.dense_decode_scores.api import decode_scores
from ..kernels.topk.api import topk
from ..plans.roles import HeadSpan
from ..types import KVView, Rows, Selection
from .counters import COUNTING


class Recall(NamedTuple):
    """Both recalls, each 0..1, of one step as float32 `[B, Hq]`; or step by step as `[steps, layers, Hq]`.

    Attributes:
        attention: dense softmax mass that falls on the set (LessIsMore, equation 3).
        token: share of dense attention's own best K tokens that lie in the set, K being the number of tokens in it
            (TidalDecode, figure 2b; LycheeCluster, table 3).
    """

    attention: Tensor
    token: Tensor


class MeanRecall(NamedTuple):
    """Both recalls of `Recall`, as means over heads, rows and steps."""

    attention: float
    token: float


class RecallObserver:
    """Measures both recalls of every decoded token, with one extra pass over the keys of every head that has a set.

    Args:
        layers: decoder layers of the model.
        keep_steps: also keep every value, for `records`; 8 bytes per layer, query head, row and step.
    """

    def __init__(self, layers: int, *, keep_steps: bool = False) -> None:
        self._sums = torch.zeros(layers, 2, dtype=torch.float64)
        self._weights = [0] * layers
        self._keep_steps = keep_steps
        self._layers = layers
        self._running: dict[int, _Step] = {}
        self._finished: list[Tensor] = []

    def observe(
        self,
        layer: int,
        span: HeadSpan,
        q: Tensor,
        kv: KVView,
        selection: Selection | None,
        scale: float,
        rows: Sequence[bool] | None = None,
    ) -> None:
        """See `Observer`; `rows` marks those that count, None: all."""
        counted = torch.ones(len(q), dtype=torch.bool) if rows is None else torch.tensor(rows)
        batch, heads = int(counted.sum()), q.shape[1]
        measured: Tensor | None = None
        if selection is not None:
            measured = torch.stack(recall_of(q, kv, selection, scale=scale)).cpu()[:, counted]
        with COUNTING:
            self._sums[layer] += batch * heads if measured is None else measured.double().sum((1, 2))
            self._weights[layer] += batch * heads
            if self._keep_steps:
                values = torch.full((2, batch, heads), torch.nan) if measured is None else measured
                self._keep(layer, span, kv.rows, values)

    def per_layer(self) -> list[MeanRecall | None]:
        """Means of each layer, heads that attend to everything counted as 1; None where nothing was decoded."""
        with COUNTING:
            pairs = list(zip(self._sums.tolist(), self._weights, strict=True))
        return [MeanRecall(mass / weight, tokens / weight) if weight else None for (mass, tokens), weight in pairs]

    def records(self) -> Recall:
        """Everything measured so far, step by step, on the host; NaN where a head attended to everything, which is 1.

        A batch of B rows makes B records per step, in row order; a step broken off before its last layer makes none.

        Raises:
            ValueError: unless the observer was made with `keep_steps=True`.
        """
        if not self._keep_steps:
            raise ValueError("this observer keeps means only; make it with keep_steps=True")
        with COUNTING:
            self._finish()
            if not self._finished:
                return Recall(*torch.empty(2, 0, self._layers, 0))
            return Recall(*torch.cat(self._finished, dim=1))

    def _keep(self, layer: int, span: HeadSpan, rows: Rows, values: Tensor) -> None:
        """File values `[2, B, heads]` under their step: its layers share one `Rows`, and no other step has it."""
        step = self._running.get(id(rows))
        if step is None:
            self._finish()
            step = self._running[id(rows)] = _Step(rows, [[] for _ in range(self._layers)])
        assert (span.start == 0) == (not step.parts[layer]), "spans of a layer come in ascending order"
        step.parts[layer].append(values)

    def _finish(self) -> None:
        """Assemble the steps that have seen all heads of their last layer."""
        for key, step in list(self._running.items()):
            layers = [torch.cat(parts, dim=-1) for parts in step.parts if parts]
            if len(layers) == self._layers and layers[-1].shape == layers[0].shape:
                self._finished.append(torch.stack(layers, dim=2))
                del self._running[key]


@dataclass(frozen=True, slots=True)
class _Step:
    """One decoded token's values by layer and span; holding its `rows` keeps their identity from being given again."""

    rows: Rows
    parts: list[list[Tensor]]


def recall_of(q: Tensor, kv: KVView, selection: Selection, *, scale: float) -> Recall:
    """Both recalls of each query head's set, from one pass over the keys.

    Args:
        q: `[B, Hq, d]`.
        kv: the cache whose last token per row is the query's own.
        selection: one set per row, KV head or query head.
        scale: factor on q·k before the softmax.

    Returns:
        float32 `[B, Hq]` each, on q's device. Among equal scores dense attention's best tokens are the earlier ones.
    """
    lengths = kv.rows.seq_lens
    scores = decode_scores(q, kv, pooling="each")
    held = membership(selection, lengths, scores.shape[-1])
    weights = (scores * scale).softmax(-1)
    return Recall(mass(weights, held), _overlap(scores, held, selection.tokens(lengths), lengths))


def membership(selection: Selection, seq_lens: Tensor, length: int) -> Tensor:
    """Which tokens a selection holds, bool `[B, G, length]` in logical order."""
    unit = selection.unit
    units = -(-length // unit)
    # One spare column takes the -1 padding.
    held = torch.zeros((*selection.ids.shape[:2], units + 1), dtype=torch.bool, device=selection.ids.device)
    held.scatter_(-1, torch.where(selection.ids < 0, units, selection.ids).long(), True)
    tokens = held[..., :length] if unit == 1 else held[..., :units].repeat_interleave(unit, dim=-1)[..., :length]
    return tokens & (torch.arange(length, device=seq_lens.device) < seq_lens[:, None])[:, None]


def mass(weights: Tensor, held: Tensor) -> Tensor:
    """What of dense attention's weights `[B, Hq, N]` lies on the tokens of each group's set `[B, G, N]`: `[B, Hq]`."""
    grouped = weights.unflatten(1, (held.shape[1], -1))
    on_set: Tensor = (grouped @ held.float()[..., None]).flatten(1)
    return on_set.clamp(max=1.0)


def _overlap(scores: Tensor, held: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
    """Share `[B, Hq]` of each head's best `counts` `[B, G]` tokens that lie in its group's set."""
    groups = held.shape[1]
    smallest, largest = (int(bound) for bound in counts.aminmax())
    # Heads whose sets are equally large need no ranking among their best.
    best, _ = topk(scores, lengths, largest, order="position" if smallest == largest else "score")
    best = best.unflatten(1, (groups, -1)).flatten(2)
    inside = held.gather(-1, best.clamp(min=0).long()).unflatten(2, (-1, min(largest, scores.shape[-1])))
    wanted = torch.arange(inside.shape[-1], device=counts.device) < counts[..., None, None]
    hits: Tensor = (inside & wanted).sum(-1) / counts[..., None]
    return hits.flatten(1)
