"""`GraphedStep`: a whole decoding step as one CUDA graph, under a `StaticCache`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import AttachmentError, UnsupportedModelError
from . import cache as caches
from .recorder import Recorder
from .run import Run
from .session import lasting
from .support import cached

NOBODY_KNOWS = -1
"""A number of calls that no cache has had."""
WARM_UPS = 2
"""Steps before a capture: kernels are compiled, and indexes reach the size that they keep."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A captured call: what it is fed, int64 `[B, n]`, and the logits `[B, V]` that each `replay` writes."""

    tokens: Tensor
    logits: Tensor
    replay: Callable[[], None]


class GraphedStep:
    """Decodes one token of every row by replaying what one step of the model launched; nothing waits for the device.

    Indexes are built on construction, which leaves the cache as it was; an index of text takes new chunks in between
    two replays. Where the policy is rectified, the dense pass over its last tokens is a second graph, and comes when it
    would in calls (where the budget ends with it, one token earlier). Between steps the cache may be read, and other
    calls may decode from it; the step after one asks the device how long the cache has become. Sparse steps cost the
    same at every length, and so do passes: shapes follow from the cache's capacity, so give it no more than the text
    needs.

    Args:
        run: attached to the model; what `saccade.sparsify` returns.
        cache: a `StaticCache` that holds the prompt, on a CUDA device.
        attention_mask: `[B, T]` of the prompt, 0 where a row is padded on the left; None if none is.

    Raises:
        UnsupportedModelError: for another cache, a mask with holes, or a policy that needs the host between steps.
        AttachmentError: if the run was restored.
    """

    def __init__(self, run: Run, cache: Any, attention_mask: Tensor | None = None) -> None:
        run.refuse_capture()
        caches.refuse_moving(cache)
        keys = cache.layers[0].keys
        self._recorder = Recorder(keys.device)
        self._run, self._cache, self._calls = run, cache, 0
        starts = row_starts(attention_mask, keys.shape[0])
        self._starts = starts.to(keys.device)
        self._left = caches.room(cache) or 0
        self._require_room()
        with self._recorder.here():
            self._upkeep = run.upkeep(cache, starts)
            self._capture()
        self._places = self._addresses()

    @property
    def room(self) -> int:
        """Steps that the cache has room for, as far as calls by others are known; a dense pass is one of them."""
        return self._left

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token, int64 `[B, 1]`, to every row; logits `[B, V]` in memory that later steps overwrite.

        Raises:
            UnsupportedModelError: if the cache is full, tokens have another shape or dtype, or more of them wait for a
                dense pass than it holds.
            AttachmentError: if the cache was emptied, reordered or given to another run since.
        """
        session = caches.session_of(self._cache)
        moved = self._upkeep.lost or self._addresses() != self._places
        if session is None or session.state is not self._state or moved:
            raise AttachmentError(
                "the cache was emptied, reordered or given to another run since; make a new GraphedStep"
            )
        expected, got = [self._starts.shape[0], 1], list(tokens.shape)
        if got != expected or tokens.dtype != torch.int64:
            raise UnsupportedModelError(f"tokens must be int64 {expected}, got {tokens.dtype} {got}")
        with self._recorder.here():
            if session.calls != self._calls:
                self._left, self._calls = caches.room(self._cache) or 0, session.calls
                self._upkeep.catch_up(self._past)
            self._require_room()
            try:
                fed = self._upkeep.before(self._past, tokens)
                recorded = self._recorded[fed.shape[1]]
                recorded.tokens.copy_(fed)
                recorded.replay()
                self._upkeep.done()
                self._left -= 1
            except BaseException:
                # Whether it was launched, the device knows: the next step asks.
                self._upkeep.undo()
                self._calls = NOBODY_KNOWS
                raise
        return recorded.logits

    @torch.inference_mode()
    def _capture(self) -> None:
        session, past = caches.session_of(self._cache), self._past
        assert session is not None, "an upkeep has installed one"
        self._state, self._recorded = session.state, {}
        with self._run.lengths_on_device(self._starts), self._run.counters.undone():
            again = self._upkeep.again(past)
            if again:
                # No pass ends behind the cache, nor begins before a row does.
                first = min(past, past + self._left - again)
                self._recorded[again] = self._record(again, first)
                # The warm-ups' keys are gone, and bounds of them must go too.
                session.state.indexes.begin(first, session.final.boundary)
            self._recorded[1] = self._record(1, past)
        self._calls = session.calls

    def _record(self, count: int, first: int) -> Recorded:
        """Capture a call of `count` tokens a row at slots from `first` on; the cache stays as it is."""
        tokens = torch.zeros((self._starts.shape[0], count), dtype=torch.int64, device=self._starts.device)
        lengths = [layer.cumulative_length for layer in caches.keeping_of(self._cache)]
        storage = [held for layer in caches.keeping_of(self._cache) for held in (layer.keys, layer.values)]
        kept = [*lengths, *(held[:, :, first : first + count] for held in storage)]
        before = [held.clone() for held in kept]

        def call() -> Tensor:
            with lasting(), torch.inference_mode():
                return forward(self._run.model, self._cache, tokens, self._starts)

        for _ in range(WARM_UPS):
            self._upkeep.prepare(first, count)
            for length in lengths:
                length.fill_(first + count - 1)
            try:
                self._recorder.rehearse(call)
            finally:
                for held, old in zip(kept, before, strict=True):
                    held.copy_(old)
        self._upkeep.prepare(first, count)
        replay, logits = self._recorder.record(call)
        return Recorded(tokens, logits, replay)

    @property
    def _past(self) -> int:
        """Slots that are filled, as far as calls by others are known."""
        return int(self._cache.layers[0].max_cache_len) - self._left

    def _require_room(self) -> None:
        if self._left < 1:
            raise UnsupportedModelError("the StaticCache is full; make it with a larger max_cache_len")

    def _addresses(self) -> tuple[int, ...]:
        """Where the cache lies: a graph reads nowhere else."""
        layers = caches.keeping_of(self._cache)
        return tuple(tensor.data_ptr() for layer in layers for tensor in (layer.keys, layer.values))


def forward(model: Any, cache: Any, tokens: Tensor, starts: Tensor) -> Tensor:
    """Logits `[B, V]` behind `tokens` int64 `[B, n]` over a filled `StaticCache`, of which all but one run again.

    Positions count from `starts`, int32 `[B]`: each row's first real slot, as in `generate`.
    """
    positions = (cache.layers[0].get_seq_length() - starts.long())[:, None]
    again = tokens.shape[1] - 1
    if again:
        positions = positions + torch.arange(-again, 1, device=tokens.device)
    # Anything of four dimensions keeps transformers from making a mask as long as the cache, which nobody looks at.
    mask = torch.ones((tokens.shape[0], 1, 1, 1), dtype=torch.bool, device=tokens.device)
    logits: Tensor = model(tokens, attention_mask=mask, position_ids=positions, **cached(model, cache)).logits[:, -1]
    return logits


def row_starts(mask: Tensor | None, batch: int) -> Tensor:
    """First real slots int32 `[B]`, on the host, of a mask `[B, T]`: zeros, then ones, or an UnsupportedModelError."""
    if mask is None:
        return torch.zeros(batch, dtype=torch.int32, device="cpu")
    seen = mask.cpu().bool()
    starts = (~seen).sum(-1)
    shaped = seen.dim() == 2 and seen.shape[0] == batch
    if not shaped or not torch.equal(seen, torch.arange(seen.shape[1], device="cpu") >= starts[:, None]):
        raise UnsupportedModelError(f"attention_mask must be [{batch}, T], zeros on the left of each row's tokens")
    if int(starts.max()) >= seen.shape[1]:
        raise UnsupportedModelError("attention_mask hides a whole row")
    return starts.int()
