"""Which rows of a step decode under the policy, and on what state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....decode.state import DecodeState
from ....types import KVView, Rows, Workspace
from ..options import drafts_with, held_by, shape_of
from .batch import Batch
from .requests import requests_of
from .room import Room
from .sampling import Sampling
from .slots import RequestSlots
from .tokens import Tokens
from .verified import VerifiedSlots
from .worker import serving_of

_SHARED = "_saccade_slots"


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Rows that decode under the policy, and their tokens."""

    state: DecodeState
    rows: Rows
    tokens: Tokens


class SparseRows:
    """Finds them in one step after the other.

    Args:
        view: a layer's cache as some rows see it.
        room: where the policy has an index in slots.
        longest: a bound on the length of any row, where steps must not depend on lengths; None: they may.
        rows: the most that a batch has, with its padding, where steps are captured.
        workspace: of all steps, which follow each other; None: there is none.
    """

    def __init__(
        self,
        vllm_config: Any,
        view: Callable[[int, Rows], KVView],
        room: Room,
        *,
        longest: int | None = None,
        rows: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        self.config, self._longest = vllm_config, longest
        self.serving = serving = serving_of(vllm_config)
        plan = serving.plan
        self.sampling = Sampling(serving, view)
        self._drafts, held = drafts_with(vllm_config), held_by(vllm_config)
        self.slots: RequestSlots | None = None
        if room.text is not None and not self._drafts:
            made = VerifiedSlots if serving.options.drafts else RequestSlots
            phase, given = serving.options.policy.phase, (room.index, room.requests, rows)
            held[_SHARED] = made(plan, phase, room.text, view, *given)
        if room.text is not None:
            # Two builders of a lossless engine share it, of which the target's is made first.
            self.slots = held[_SHARED]
        indexes = serving.indexes if self.slots is None else self.slots
        self._state = DecodeState(
            plan, serving.counters, exhaustive_is_dense=False, indexes=indexes, workspace=workspace
        )
        if longest is not None:
            self.sampling.keep(shape_of(vllm_config).group, rows)

    def batch(self, common: Any) -> Batch:
        """A step's rows, from vLLM's `CommonAttentionMetadata`; the index of those that are requests follows them."""
        batch = Batch.of(common, requests_of(self.config))
        if self.slots is not None:
            table, lengths = common.block_table_tensor, common.seq_lens
            if batch.announced:
                self.slots.follow(batch, table, lengths, drafts=self._drafts)
            else:
                self.slots.warm_up(batch, table, lengths)
        return batch

    @property
    def leaves_layers(self) -> bool:
        """Whether captured steps leave layers to vLLM's kernel, since all heads of these are dense."""
        return self._longest is not None and any(self.serving.plan.roles.passive)

    def covers(self, length: int) -> bool:
        """Whether vLLM's own kernel serves a row of `length` tokens, because every head attends to all of them.

        What captured steps run is compiled with them, and runs in others too.
        """
        plan = self.serving.plan
        return plan.selector is None or (self._longest is None and plan.covers(length))

    def choose(self, batch: Batch) -> list[int]:
        """Begin a mixed step, and name its rows that select: those that decode and are not covered."""
        pairs = zip(self._searching(batch), batch.lengths, strict=True)
        chosen = [row for row, (decodes, length) in enumerate(pairs) if decodes and not self.covers(length)]
        self._report(batch, chosen)
        self.serving.attended.begin(bool(chosen))
        return chosen

    def whole(self, batch: Batch) -> list[bool]:
        """Which rows of a step of one new token each do not decode under the policy; not those that pad the batch."""
        decoding, known = self._searching(batch), batch.announced
        chosen = [row for row, decodes in enumerate(decoding) if decodes]
        self._report(batch, chosen)
        self.serving.attended.begin(bool(chosen) or not known, len(decoding), warms=not known)
        return [queries == 1 and not decodes for queries, decodes in zip(batch.queries, decoding, strict=True)]

    def all_of(self, batch: Batch, whole: list[bool], rows: Rows) -> Sparse:
        """All rows of a step, in order; those that are `whole` search no index."""
        if self.slots is not None:
            told = zip(batch.requests, batch.queries, whole, strict=True)
            self.slots.place([one if batch.announced and new and not other else None for one, new, other in told], rows)
        self.sampling.sample(batch, whole, rows)
        self._state.observers = self.sampling.keeping
        self._state.begin(0)
        # A position for every row: those that pad the batch come last.
        return Sparse(self._state, rows, Tokens(slice(rows.batch)))

    def of(self, batch: Batch, chosen: list[int], table: Tensor, lengths: Tensor, tokens: Tokens) -> Sparse:
        """How the S chosen rows of a mixed step decode, with blocks int32 `[S, n]` and lengths int32 `[S]`."""
        rows = batch.rows(chosen, table, lengths, longest=self._longest)
        if self.slots is not None:
            self.slots.place([batch.requests[row] for row in chosen], rows)
        known = [batch.lengths[row] for row in chosen]
        self._state.observers = self.sampling.observers(known) if batch.announced else ()
        self._state.begin(0)
        return Sparse(self._state, rows, tokens)

    def _searching(self, batch: Batch) -> list[bool]:
        """Which rows decode: where that takes an index in slots, requests alone."""
        return batch.decoding if self.slots is None or batch.announced else [False] * len(batch.queries)

    def _report(self, batch: Batch, chosen: list[int]) -> None:
        metrics = self.serving.metrics
        if metrics is None:
            return
        if not batch.announced:
            metrics.disregard()
            return
        others = set(range(len(batch.lengths))).difference(chosen)
        dense = [
            batch.lengths[row]
            for row, request in enumerate(batch.requests)
            if row in others and request.sparse and request.decodes(batch.queries[row], batch.prefilling[row])
        ]
        metrics.step([batch.lengths[row] for row in chosen], dense)
