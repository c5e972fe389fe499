"""`GraphedStep`: a whole decoding step as one CUDA graph, under a `StaticCache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import AttachmentError, UnsupportedModelError
from . import cache as caches
from .run import Run
from .session import lasting

WARM_UPS = 2
"""Steps before the capture: kernels are compiled, and indexes reach the size that they keep."""


class GraphedStep:
    """Decodes one token of every row by replaying what one step of the model launched; nothing waits for the device.

    Indexes are built on construction, which leaves the cache as it was; an index of text takes new chunks in between
    two replays. Between steps the cache may be read, and other calls may decode from it; the step after one asks the
    device how long the cache has become. A step costs the same at every length: shapes follow from the cache's
    capacity, so give it no more than the text needs.

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
        if not keys.is_cuda:
            raise UnsupportedModelError(f"CUDA graphs need a CUDA device; this cache is on {keys.device}")
        self._run, self._cache, self._calls = run, cache, 0
        starts = row_starts(attention_mask, keys.shape[0])
        self._starts = starts.to(keys.device)
        self._left = caches.room(cache) or 0
        self._require_room()
        with torch.cuda.device(keys.device):
            self._upkeep = run.upkeep(cache, starts)
            self._capture(keys)
        self._places = self._addresses()

    @property
    def room(self) -> int:
        """Steps that the cache has room for, as far as calls by others are known."""
        return self._left

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token, int64 `[B, 1]`, to every row; logits `[B, V]` in memory that the next step overwrites.

        Raises:
            UnsupportedModelError: if the cache is full, or tokens have another shape or dtype.
            AttachmentError: if the cache was emptied, reordered or given to another run since.
        """
        session = caches.session_of(self._cache)
        moved = self._upkeep.lost or self._addresses() != self._places
        if session is None or session.state is not self._state or moved:
            raise AttachmentError(
                "the cache was emptied, reordered or given to another run since; make a new GraphedStep"
            )
        expected, got = list(self._tokens.shape), list(tokens.shape)
        if got != expected or tokens.dtype != torch.int64:
            raise UnsupportedModelError(f"tokens must be int64 {expected}, got {tokens.dtype} {got}")
        if session.calls != self._calls:
            self._left, self._calls = caches.room(self._cache) or 0, session.calls
        self._require_room()
        self._tokens.copy_(tokens)
        with torch.cuda.device(self._tokens.device):
            self._upkeep.before(self._past, tokens)
            self._graph.replay()
            self._upkeep.done()
        self._left -= 1
        return self._logits

    @torch.inference_mode()
    def _capture(self, keys: Tensor) -> None:
        self._tokens = torch.zeros((keys.shape[0], 1), dtype=torch.int64, device=keys.device)
        lengths = [layer.cumulative_length for layer in self._cache.layers]
        before = [length.clone() for length in lengths]
        stream = torch.cuda.Stream(keys.device)
        stream.wait_stream(torch.cuda.current_stream(keys.device))
        with self._run.lengths_on_device(self._starts):
            with torch.cuda.stream(stream), self._run.counters.undone():
                for _ in range(WARM_UPS):
                    self._upkeep.before(self._past)
                    try:
                        self._forward()
                    finally:
                        # What a warm-up wrote behind the last token is overwritten by the first step.
                        for length, old in zip(lengths, before, strict=True):
                            length.copy_(old)
            torch.cuda.current_stream(keys.device).wait_stream(stream)
            session = caches.session_of(self._cache)
            assert session is not None, "the warm-up has installed one"
            self._state = session.state
            self._graph = torch.cuda.CUDAGraph()
            self._upkeep.before(self._past)
            with self._run.counters.undone(), torch.cuda.graph(self._graph, stream=stream):
                self._logits = self._forward()
        self._calls = session.calls

    @property
    def _past(self) -> int:
        """Slots that are filled, as far as calls by others are known."""
        return int(self._cache.layers[0].max_cache_len) - self._left

    def _require_room(self) -> None:
        if self._left < 1:
            raise UnsupportedModelError("the StaticCache is full; make it with a larger max_cache_len")

    def _addresses(self) -> tuple[int, ...]:
        """Where the cache lies: a graph reads nowhere else."""
        return tuple(tensor.data_ptr() for layer in self._cache.layers for tensor in (layer.keys, layer.values))

    def _forward(self) -> Tensor:
        with lasting(), torch.inference_mode():
            return forward(self._run.model, self._cache, self._tokens, self._starts)


def forward(model: Any, cache: Any, tokens: Tensor, starts: Tensor) -> Tensor:
    """Logits `[B, V]` behind `tokens` int64 `[B, 1]` over a filled `StaticCache`.

    Positions count from `starts`, int32 `[B]`: each row's first real slot, as in `generate`.
    """
    positions = (cache.layers[0].cumulative_length - starts.long())[:, None]
    # Anything of four dimensions keeps transformers from making a mask as long as the cache, which nobody looks at.
    mask = torch.ones((tokens.shape[0], 1, 1, 1), dtype=torch.bool, device=tokens.device)
    output = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    logits: Tensor = output.logits[:, -1]
    return logits


def row_starts(mask: Tensor | None, batch: int) -> Tensor:
    """First real slot of each row, int32 `[B]`, from a mask `[B, T]`; reads it on the host.

    Raises:
        UnsupportedModelError: for a mask of another form than zeros before ones.
    """
    if mask is None:
        return torch.zeros(batch, dtype=torch.int32)
    seen = mask.cpu().bool()
    starts = (~seen).sum(-1)
    shaped = seen.dim() == 2 and seen.shape[0] == batch
    if not shaped or not torch.equal(seen, torch.arange(seen.shape[1]) >= starts[:, None]):
        raise UnsupportedModelError(f"attention_mask must be [{batch}, T], zeros on the left of each row's tokens")
    if int(starts.max()) >= seen.shape[1]:
        raise UnsupportedModelError("attention_mask hides a whole row")
    return starts.int()
