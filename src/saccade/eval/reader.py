"""Reading: a text is prefilled once, densely; questions are then decoded under any policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..adapters.hf.cache import tell
from ..machine import synchronize
from ..plans.rectify import Phase
from .context import ANSWER_TOKENS

NEVER = Phase(None)


def prefilled(model: Any, tokens: Sequence[int]) -> DynamicCache:
    """A cache with one text in it; the caller says whether gradients are kept."""
    cache = DynamicCache()
    ids = torch.tensor([tokens], device=model.device)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


class Reader:
    """A model with one text in its cache.

    What is decoded is cropped from the cache afterwards, so that no question and no policy sees another one's tokens.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, tokens: Sequence[int]) -> None:
        self._model = model
        self._length = len(tokens)
        self._cache = prefilled(model, tokens)
        self._ids = torch.tensor([tokens], device=model.device)
        tell(self._cache, self._ids)

    @torch.inference_mode()
    def repeat(self, rows: int) -> None:
        """Hold the text so many times, for questions that are decoded together."""
        self._cache.batch_repeat_interleave(rows)
        tell(self._cache, self._ids.repeat(rows, 1))

    def feed(self, tokens: Sequence[int], phase: Phase = NEVER) -> Tensor:
        """Decode given tokens, at least one; the logits `[V]` behind the last one. See `feed_rows`."""
        return self.feed_rows([tokens], len(tokens) - 1, phase)[0, -1]

    @torch.inference_mode()
    def feed_rows(self, rows: Sequence[Sequence[int]], first: int, phase: Phase = NEVER) -> Tensor:
        """Decode n given tokens per row; logits `[rows, n - first, V]` behind those from `first` on.

        Inside `run.decoding()` they go through the model together, each choosing its own set as if it came alone; if
        the policy has dense passes, whose `phase` this is, only as far as no pass falls among them.
        """
        tokens = torch.tensor(rows, device=self._model.device)
        done, parts = 0, []
        for together in phase.pieces(self.decoded, tokens.shape[1]):
            piece, done = tokens[:, done : done + together], done + together
            keep = max(min(together, done - first), 1)
            logits = self._model(piece, past_key_values=self._cache, use_cache=True, logits_to_keep=keep).logits
            if done > first:
                parts.append(logits)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def answer(self, logits: Tensor, tokenizer: Any, longest: int = ANSWER_TOKENS, *, sentence: bool = True) -> str:
        """Continue greedily from logits `[V]` to the end of sequence, `longest` tokens or the end of a `sentence`."""
        said: list[int] = []
        text = ""
        while True:
            said.append(int(logits.argmax()))
            if said[-1] == tokenizer.eos_token_id:
                return text.strip()
            text = str(tokenizer.decode(said))
            if len(said) == longest or (sentence and ("." in text or "\n" in text.lstrip())):
                return text.strip()
            logits = self.feed(said[-1:])

    def timed(self, tokens: Sequence[int]) -> Iterator[float]:
        """Decode given tokens one by one; seconds of each step."""
        for token in tokens:
            synchronize(self._model.device)
            start = time.perf_counter()
            self.feed((token,))
            synchronize(self._model.device)
            yield time.perf_counter() - start

    @property
    def nbytes(self) -> int:
        """What keys and values take in memory."""
        return sum(tensor.nbytes for layer in self._layers for tensor in (layer.keys, layer.values))

    @property
    def _layers(self) -> list[Any]:
        return list(self._cache.layers)

    @property
    def room(self) -> int:
        """Positions that the model has left."""
        return int(self._model.config.max_position_embeddings) - self._length - self.decoded

    @property
    def decoded(self) -> int:
        """Tokens in the cache behind the text."""
        return int(self._cache.get_seq_length()) - self._length

    def crop(self, decoded: int = 0) -> None:
        """Forget what was decoded but for the first `decoded` tokens behind the text."""
        # Layer by layer: after an error in the middle of a pass not all of them have as many tokens too many.
        for layer in self._layers:
            surplus = layer.get_seq_length() - self._length - decoded
            if surplus > 0:
                layer.crop(-surplus)
