"""How much of dense attention a chosen set holds: its softmax mass, and its own best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels._softmax import capped, weights_of
from ..kernels.dense_decode_scores.api import decode_scores
from ..kernels.topk.api import topk
from ..plans.roles import HeadSpan
from ..types import KVView, Rows, Selection, Softmax
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
    """Both recalls of `Recall`, as means over heads with a set, rows and steps.

    A head has a set if its role attends to one (SELECT, REUSE), in every step: where the budget covers the row, the set
    is all of it and its recall 1, whatever else is in the batch. DENSE and PUBLISH heads have none. A mean that counted
    them as 1 would rank policies by how much they leave dense.

    Attributes:
        attention, token: 0..1; None where no head has a set.
        heads_with_set: share of the heads 0..1 that have one.
    """

    attention: float | None
    token: float | None
    heads_with_set: float

    @classmethod
    def over(cls, parts: Sequence[MeanRecall]) -> MeanRecall:
        """Of several layers or tokens with as many heads each: every head with a set counts once."""
        share = sum(part.heads_with_set for part in parts)
        attention, token = (
            sum((part[measure] or 0.0) * part.heads_with_set for part in parts) / share if share else None
            for measure in (0, 1)
        )
        return cls(attention, token, share / len(parts))

    @classmethod
    def of_parts(cls, parts: Sequence[MeanRecall | None]) -> MeanRecall | None:
        """As `over`, of those that were measured; None if none was."""
        measured = [part for part in parts if part is not None]
        return cls.over(measured) if measured else None

    @property
    def with_dense(self) -> tuple[float, float]:
        """Both recalls with dense heads as 1."""
        attention, token = (1 - self.heads_with_set * (1 - (recall or 0.0)) for recall in self[:2])
        return attention, token

    @staticmethod
    def row(layers: Sequence[MeanRecall | None]) -> dict[str, Any]:
        """What a row of a results file says of the model's layers, in order; None where nothing was measured."""
        over = MeanRecall.of_parts(layers)
        found: dict[str, Any] = {"heads_with_set_per_layer": [layer and layer.heads_with_set for layer in layers]}
        for place, name in enumerate(("recall", "token_recall")):
            found[name], found[f"{name}_with_dense"] = over and over[place], over and over.with_dense[place]
            found[f"{name}_per_layer"] = [layer and layer[place] for layer in layers]
        return found


class RecallObserver:
    """Measures both recalls of every decoded token, with one extra pass over the keys of every head that has a set.

    Dense passes over earlier steps (rectification) are not among what it sees.

    Args:
        layers: number of the model's layers; of a model with layers of several kinds, those with full attention.
        keep_steps: also keep every value, for `records`; 8 bytes per layer, query head, row and step.
    """

    def __init__(self, layers: int | Sequence[int], *, keep_steps: bool = False) -> None:
        self._layers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        count = max(self._layers, default=-1) + 1
        # On the host, also where it is made while vLLM builds a model, with a device for a default.
        self._sums = torch.zeros(count, 2, dtype=torch.float64, device="cpu")
        self._with_set = [0] * count
        self._seen = [0] * count
        self._keep_steps = keep_steps
        self._running: dict[int, _Step] = {}
        self._finished: list[Tensor] = []

    def observe(
        self,
        layer: int,
        span: HeadSpan,
        q: Tensor,
        kv: KVView,
        selection: Selection | None,
        softmax: Softmax,
        rows: Sequence[bool] | None = None,
    ) -> None:
        """See `Observer`; `rows` marks those that count, None: all."""
        counted = torch.tensor([True] * len(q) if rows is None else list(rows), device="cpu")
        batch, heads = int(counted.sum()), q.shape[1]
        if selection is None:
            values = torch.full((2, batch, heads), torch.nan if span.role.attends_to_all else 1.0, device="cpu")
        else:
            values = torch.stack(recall_of(q, kv, selection, softmax)).cpu()[:, counted]
        with COUNTING:
            self._seen[layer] += batch * heads
            if not span.role.attends_to_all:
                self._sums[layer] += values.double().sum((1, 2))
                self._with_set[layer] += batch * heads
            if self._keep_steps:
                self._keep(layer, span, kv.rows, values)

    def per_layer(self) -> list[MeanRecall | None]:
        """Means of each layer, by its number in the model; None where nothing was decoded."""
        with COUNTING:
            held = list(zip(self._sums.tolist(), self._with_set, self._seen, strict=True))
        means: list[MeanRecall | None] = []
        for sums, count, seen in held:
            attention, token = (one / count if count else None for one in sums)
            means.append(MeanRecall(attention, token, count / seen) if seen else None)
        return means

    def records(self) -> Recall:
        """Everything measured so far, step by step, on the host; NaN for heads without a set (see `MeanRecall`).

        A batch of B rows makes B records per step, in row order; a step broken off before its last layer makes none.

        Raises:
            ValueError: unless the observer was made with `keep_steps=True`.
        """
        if not self._keep_steps:
            raise ValueError("this observer keeps means only; make it with keep_steps=True")
        with COUNTING:
            self._finish()
            if not self._finished:
                return Recall(*torch.empty(2, 0, len(self._layers), 0, device="cpu"))
            return Recall(*torch.cat(self._finished, dim=1))

    def _keep(self, layer: int, span: HeadSpan, rows: Rows, values: Tensor) -> None:
        """File values `[2, B, heads]` under their step: its layers share one `Rows`, and no other step has it."""
        step = self._running.get(id(rows))
        if step is None:
            self._finish()
            step = self._running[id(rows)] = _Step(rows, {number: [] for number in self._layers})
        assert (span.start == 0) == (not step.parts[layer]), "spans of a layer come in ascending order"
        step.parts[layer].append(values)

    def _finish(self) -> None:
        """Assemble the steps that have seen all heads of their last layer."""
        for key, step in list(self._running.items()):
            layers = [torch.cat(parts, dim=-1) for parts in step.parts.values() if parts]
            if len(layers) == len(self._layers) and layers[-1].shape == layers[0].shape:
                self._finished.append(torch.stack(layers, dim=2))
                del self._running[key]


@dataclass(frozen=True, slots=True)
class OfRows:
    """An `Observer` that lets recall be measured in some rows only.

    Attributes:
        rows: which ones.
        longest: a bound on the length of any row, where that of the cache's view is far from it.
    """

    recall: RecallObserver
    rows: Sequence[bool]
    longest: int

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        bounded = replace(kv, rows=replace(kv.rows, max_len=self.longest))
        self.recall.observe(layer, span, q, bounded, selection, softmax, self.rows)


@dataclass(frozen=True, slots=True)
class _Step:
    """One decoded token's values by layer and span; holding its `rows` keeps their identity from being given again."""

    rows: Rows
    parts: dict[int, list[Tensor]]


def recall_of(q: Tensor, kv: KVView, selection: Selection, softmax: Softmax) -> Recall:
    """Both recalls of each query head's set, from one pass over the keys.

    Args:
        q: `[B, Hq, d]`.
        kv: the cache whose last token per row is the query's own.
        selection: one set per row, KV head or query head.
        softmax: what the layer makes of scores q·k.

    Returns:
        float32 `[B, Hq]` each, on q's device. Among equal scores dense attention's best tokens are the earlier ones.
    """
    lengths = kv.rows.seq_lens
    scores = decode_scores(q, kv, pooling="each")
    held = membership(selection, lengths, scores.shape[-1])
    weights = dense_weights(scores, softmax)
    return Recall(mass(weights, held), _overlap(scores, held, selection.tokens(lengths), lengths))


def dense_weights(scores: Tensor, softmax: Softmax) -> Tensor:
    """What dense attention makes of scores `[B, Hq, N]` of all tokens; sinks have the rest."""
    return weights_of(capped(scores * softmax.scale, softmax.cap)[:, :, None], softmax.sinks)[:, :, 0]


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
    on_set: Tensor = (weights.unflatten(1, (held.shape[1], -1)) @ held.float()[..., None]).flatten(1)
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
