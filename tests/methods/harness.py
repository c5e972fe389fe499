"""Runs `saccade.decode.attend.attend` over a batch and reads back which positions every query head attended to."""

import numpy as np
import torch

from saccade.decode.attend import attend
from saccade.decode.counters import Counters
from saccade.decode.state import DecodeState
from saccade.plans.plan import Plan
from saccade.plans.rectify import ALL
from saccade.plans.roles import HeadSpan
from saccade.text.history import TokenHistory
from saccade.types import KVView, Selection, Softmax

from . import oracles
from .layouts import LEVELS, Batch

SCALE = 8**-0.5
SOFTMAX = Softmax(SCALE)


class SetRecorder:
    """Observer that expands every selection with loops: ``sets[row][layer][query head]``."""

    def __init__(self) -> None:
        self.sets: dict[tuple[int, int, int], list[int]] = {}

    def observe(
        self, layer: int, span: HeadSpan, q: torch.Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        group = q.shape[1] // kv.kv_heads
        for row, length in enumerate(kv.rows.seq_lens.tolist()):
            for head in range(q.shape[1]):
                positions = (
                    list(range(length)) if selection is None else expand(selection, row, head, q.shape[1], length)
                )
                self.sets[row, layer, span.start * group + head] = positions


def expand(selection: Selection, row: int, head: int, heads: int, length: int) -> list[int]:
    group = head // (heads // selection.groups)
    count = int(selection.counts[row, group])
    ids = selection.ids[row, group].tolist()
    assert ids[count:] == [-1] * (len(ids) - count), "-1 after the count"
    assert ids[:count] == sorted(set(ids[:count])), "ascending, no duplicate"
    tokens = [t for i in ids[:count] for t in range(i * selection.unit, (i + 1) * selection.unit)]
    # Only the current token's page may stick out of the row.
    assert all(i * selection.unit < length for i in ids[:count]), "no future position"
    return [t for t in tokens if t < length]


class Decoder:
    """A plan's state over successive steps of one batch."""

    def __init__(self, plan: Plan, *, shortcut: bool = True) -> None:
        self.recorder = SetRecorder()
        self.counters = Counters(len(plan.roles.layers))
        history = TokenHistory(LEVELS)
        self.state = DecodeState(plan, self.counters, [self.recorder], exhaustive_is_dense=shortcut, history=history)

    def step(
        self,
        batch: Batch,
        layout: str,
        dtype: torch.dtype,
        *,
        clean: int | None = None,
        text: bool = True,
        begin: bool = True,
    ) -> tuple[list[oracles.Sets], list[list[np.ndarray]]]:
        """Sets ``[row][layer][query head]`` and outputs ``[row][layer]`` of the batch's newest token.

        Args:
            clean: slots below it hold what no unrectified sparse step wrote; None: nobody rectifies.
            text: whether the model was fed token ids.
            begin: whether the step is a call of its own, as it is in every adapter.
        """
        self.recorder.sets.clear()
        views = batch.views(layout, dtype)
        rows = views[0].rows
        ids, positions = batch.by_slot(rows.row_start.tolist())
        # All of it again: rows of a paged cache do not end at one slot, as calls of the transformers adapter do.
        self.state.history.record(0, ids.shape[1], len(ids), ids if text else None, positions)
        if begin:
            self.state.begin(rows.max_len - 1, ALL if clean is None else clean)
        outputs = [
            attend(self.state, layer, batch.queries(layer, dtype), view, SOFTMAX) for layer, view in enumerate(views)
        ]
        heads = batch.kv_heads * batch.group
        sets = [
            [[self.recorder.sets[row, layer, head] for head in range(heads)] for layer in range(batch.layers)]
            for row in range(len(batch.k))
        ]
        return sets, [[out[row].double().numpy() for out in outputs] for row in range(len(batch.k))]

    def begin(self, batch: Batch, layout: str = "padded") -> None:
        """A call on the cache as it is now, whatever it held before."""
        self.state.begin(batch.views(layout, torch.float32)[0].rows.max_len)

    def permute(self, rows: list[int]) -> None:
        """Let batch row `i` continue what row `rows[i]` was."""
        self.state.indexes.permute(torch.tensor(rows))
        self.state.history.permute(torch.tensor(rows))


def check_outputs(batch: Batch, sets: list[oracles.Sets], outputs: list[list[np.ndarray]], dtype: torch.dtype) -> None:
    """Every output within the error budget of its dtype of the float64 attention over the same set.

    Values are at most 2, scores before the softmax at most 4 * 8 * SCALE < 12 and exact until scaled.
    float32: a scaled score is off by 2 roundings of 12 (24 u), its exponential by that relative error and 2 u more, for
    numerator and denominator; sums of T terms add T u each; so |error| <= 2 * (2 * 26 + 2 T) u, u = 2**-24.
    bfloat16: the weights and the result may be rounded to 8 bits once each, 2**-9 relative: 2 * 2 * 2**-9 more.
    """
    for row, per_layer in enumerate(outputs):
        length = batch.lengths[row]
        tolerance = 2 * (52 + 2 * length) * 2.0**-24 + (2 * 2 * 2.0**-9 if dtype == torch.bfloat16 else 0.0)
        for layer, out in enumerate(per_layer):
            q, k, v = batch.q[row][layer], batch.k[row][layer], batch.v[row][layer]
            exact = oracles.outputs(q, k, v, sets[row][layer], SCALE)
            error = np.abs(out - exact).max()
            assert error <= tolerance, f"row {row}, layer {layer}: {error} > {tolerance}"
