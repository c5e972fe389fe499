"""Steps that become CUDA graphs: whether they can, and what is kept of them for who measures recall behind them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..plans.plan import Plan
from ..plans.rectify import Rectify
from ..plans.roles import HeadSpan
from ..types import KVView, Rows, Selection, Softmax
from .recall import RecallObserver


def reasons_against_capture(plan: Plan, rectify: Rectify | None, observers: Sequence[object]) -> list[str]:
    """All that the host does between the steps of a plan, a line each; empty if every step can be a replay.

    Args:
        plan: what runs.
        rectify: how its sparse steps are made good, if they are.
        observers: who looks at every step.
    """
    reasons = []
    if rectify is not None and rectify.mode == "verify":
        reasons.append(f"rectify={rectify} compares drafts with dense logits on the host; use mode overwrite")
    if plan.moves_index:
        reasons.append("its index moves in memory as it grows")
    if observers:
        reasons.append("observers and recall look at every step on the host")
    return reasons


class KeptSteps:
    """An `Observer` of steps that nobody sees on the host: every step overwrites what the one before it has left.

    Args:
        plan: whose heads are observed.
        group: query heads per KV head.
        rows: the most that a batch has.
    """

    def __init__(self, plan: Plan, group: int, rows: int) -> None:
        self._plan, self._group, self._rows = plan, group, rows
        # By layer and first head: queries and sets of as many rows.
        self._held: dict[tuple[int, int], tuple[Tensor, Selection, Softmax]] = {}

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        if selection is None:
            return
        key, batch = (layer, span.start), len(q)
        if key not in self._held:
            queries, ids, counts = (
                part.new_zeros((self._rows, *part.shape[1:])) for part in (q, selection.ids, selection.counts)
            )
            self._held[key] = queries, Selection(ids, counts, selection.unit), softmax
        queries, sets, _ = self._held[key]
        for memory, part in ((queries, q), (sets.ids, selection.ids), (sets.counts, selection.counts)):
            memory[:batch].copy_(part)

    def measure(
        self, recall: RecallObserver, rows: Rows, view: Callable[[int, Rows], KVView], counted: Sequence[bool]
    ) -> None:
        """Let `recall` observe the latest step, whose first rows were `rows`; `counted` marks those that count.

        `view` gives a layer's cache, in which nothing of the step may have been overwritten.
        """
        batch = rows.batch
        for layer, spans in enumerate(self._plan.roles.spans):
            kv = view(layer, rows)
            for span in spans:
                held, heads = self._held.get((layer, span.start)), kv.heads(span.start, span.stop)
                if held is None:
                    # Its heads are dense: how many there are is all that is asked for.
                    queries = torch.empty(batch, (span.stop - span.start) * self._group, 0, device="cpu")
                    recall.observe(layer, span, queries, heads, None, Softmax(1.0), counted)
                else:
                    queries, sets, softmax = held
                    selection = Selection(sets.ids[:batch], sets.counts[:batch], sets.unit)
                    recall.observe(layer, span, queries[:batch], heads, selection, softmax, counted)
