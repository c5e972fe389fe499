"""Reading: a context is prefilled once, densely; questions are then decoded under any policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..machine import synchronize
from .context import ANSWER_TOKENS, Context


class Reader:
    """A model with one context in its cache.

    What is decoded is cropped from the cache afterwards, so that no question and no policy sees another one's tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, context: Context) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache = DynamicCache()
        self._length = len(context.tokens)
        self._device = next(model.parameters()).device
        with torch.inference_mode():
            tokens = torch.tensor([context.tokens], device=self._device)
            model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int], *, every: int | None = None) -> Tensor:
        """Decode given tokens; the logits `[V]` behind the last one.

        Inside `run.decoding()` they go through the model together, each choosing its own set as if it came alone.

        Args:
            tokens: at least one.
            every: sparse steps between dense passes over them, if the policy has such passes. Tokens then go together
                only as far as no pass falls among them, because a pass takes place at the beginning of a call.
        """
        rest = list(tokens)
        while True:
            together = len(rest) if every is None else min(len(rest), max(every - self.decoded % (every + 1), 1))
            logits = self._step(rest[:together])
            rest = rest[together:]
            if not rest:
                return logits

    @torch.inference_mode()
    def answer(self, logits: Tensor) -> str:
        """Continue greedily from logits `[V]` to the end of the answer: full stop, new line, end of sequence."""
        said: list[int] = []
        text = ""
        while True:
            said.append(int(logits.argmax()))
            if said[-1] == self._tokenizer.eos_token_id:
                return text.strip()
            text = str(self._tokenizer.decode(said))
            if "." in text or "\n" in text.lstrip() or len(said) == ANSWER_TOKENS:
                return text.strip()
            logits = self._step(said[-1:])

    @torch.inference_mode()
    def timed(self, tokens: Sequence[int]) -> Iterator[float]:
        """Decode given tokens one by one; seconds of each step."""
        for token in tokens:
            synchronize(self._device)
            start = time.perf_counter()
            self._step((token,))
            synchronize(self._device)
            yield time.perf_counter() - start

    @property
    def nbytes(self) -> int:
        """What keys and values take in memory."""
        layers: list[Any] = list(self._cache.layers)
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None)

    @property
    def room(self) -> int:
        """Positions that the model has left."""
        return int(self._model.config.max_position_embeddings) - self._length - self.decoded

    @property
    def decoded(self) -> int:
        """Tokens in the cache behind the context."""
        return int(self._cache.get_seq_length()) - self._length

    def crop(self, decoded: int = 0) -> None:
        """Forget what was decoded but for the first `decoded` tokens behind the context."""
        surplus = self.decoded - decoded
        # transformers takes the number of tokens to remove as a negative one; 0 is not a no-op for every cache.
        if surplus > 0:
            self._cache.crop(-surplus)

    def _step(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self._device)
        logits: Tensor = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        return logits[0, -1]
