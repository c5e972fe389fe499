"""Reading: a text is prefilled once, densely; questions are then decoded under any policy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..adapters.hf.cache import refuse_cache, tell
from ..adapters.hf.support import cached, empty_cache, text_config
from ..checkpoints.shape import shape_of
from ..checkpoints.versions import cache_argument
from ..errors import UnsupportedModelError
from ..plans.rectify import Phase
from ..recipes.machine import synchronize
from .context import ANSWER_TOKENS
from .snapshot import Snapshot

NEVER = Phase(None)


def prefilled(model: Any, tokens: Sequence[int]) -> Any:
    """A cache with one text in it; whether with gradients, the caller says. Refused if it has no layers."""
    ids = torch.tensor([tokens], device=model.device)
    cache = model(ids, **cached(model, empty_cache(model)), logits_to_keep=1)[cache_argument(model)]
    refuse_cache(cache, shape_of(model.config).keeping)
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
        self._shape = shape_of(model.config)
        self._ids = torch.tensor([tokens], device=model.device)
        tell(self._cache, self._ids)
        self._places: dict[int, Snapshot] = {}
        self.mark()

    @torch.inference_mode()
    def repeat(self, rows: int) -> None:
        """Hold the text so many times, for questions that are decoded together."""
        self.crop()
        for layer in self._layers:
            layer.batch_repeat_interleave(rows)
        Snapshot.of(self._cache, self._shape.keeping, rows).put_back(self._cache)
        tell(self._cache, self._ids.repeat(rows, 1))
        self.mark()

    @torch.inference_mode()
    def mark(self) -> None:
        """Remember this place, so that `crop` can come back to it; where all layers crop, it can to any place."""
        if self._shape.kinds:
            here = self._length + self.decoded
            self._places[here] = Snapshot.of(self._cache, self._shape.keeping)

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
            # A model whose first layer has no length would begin to count anew.
            first_position = self._length + self.decoded
            at = torch.arange(first_position, first_position + together, device=tokens.device)[None]
            inputs = {"position_ids": at, **cached(self._model, self._cache)}
            logits = self._model(piece, logits_to_keep=keep, **inputs).logits
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
        """What keys and values take in memory, and what other layers hold."""
        kept: int = sum(tensor.nbytes for layer in self._layers for tensor in (layer.keys, layer.values))
        return kept + sum(place.nbytes for place in self._places.values())

    @property
    def _layers(self) -> list[Any]:
        """Those with full attention."""
        return [self._cache.layers[layer] for layer in self._shape.keeping]

    @property
    def room(self) -> int:
        """Positions that the model has left."""
        return int(text_config(self._model).max_position_embeddings) - self._length - self.decoded

    @property
    def decoded(self) -> int:
        """Tokens in the cache behind the text."""
        return int(self._layers[0].get_seq_length()) - self._length

    @torch.inference_mode()
    def crop(self, decoded: int = 0) -> None:
        """Forget what was decoded but for the first `decoded` tokens behind the text.

        Raises:
            UnsupportedModelError: if layers have forgotten that place, and nobody has marked it.
        """
        end = self._length + decoded
        if self._shape.kinds and end not in self._places:
            told = f"layers of type {self._shape.other_kinds} have forgotten what they held"
            raise UnsupportedModelError(f"{told} {decoded} tokens behind the text, which was not marked")
        # Layer by layer: after an error in the middle of a pass not all of them have as many tokens too many.
        for layer in self._layers:
            surplus = layer.get_seq_length() - end
            if surplus > 0:
                layer.crop(-surplus)
        self._places = {place: held for place, held in self._places.items() if place <= end}
        if self._shape.kinds:
            self._places[end].put_back(self._cache)
