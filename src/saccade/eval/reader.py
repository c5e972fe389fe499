"""Reading: a text is prefilled once, densely; questions are then decoded under any policy."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..adapters.hf.cache import refuse_cache, tell
from ..adapters.hf.support import cached, empty_cache, text_config
from ..checkpoints.shape import shape_of
from ..checkpoints.versions import cache_argument
from ..errors import UnsupportedModelError
from ..plans.rectify import Phase
from ..recipes.machine import free_memory, synchronize
from .sheet import Sheet
from .snapshot import Snapshot

NEVER = Phase(None)

Hear = Callable[[Sequence[int]], tuple[str, bool]]
"""What so many tokens say, and whether an answer ends with them."""

UNTOLD, PLANNED, ROW, WIDEST = 4 * 2**30, 7 / 8, 1.5, 6
"""Free bytes if nobody says; the share planned with; caches that one with room and index takes; tensors of a layer."""


def rows_that_fit(model: Any, tokens: int, longest: int, asked: int, processes: int = 1) -> int:
    """Rows of batches for `asked` questions: as few and as even as free memory, which `processes` share, allows.

    Each row has its own cache with a text of so many tokens and the `longest` question with its answer; beside them a
    pass over the text needs the most room.
    """
    told, itemsize, shape = free_memory(model.device), model.dtype.itemsize, shape_of(model.config)
    free = (UNTOLD if told is None else told) // processes
    vocabulary = model.get_input_embeddings().weight.shape[0]
    widest = max(size for weight in model.parameters() for size in weight.shape if size != vocabulary)
    row = (tokens + longest) * shape.token_bytes(itemsize) * ROW
    fitting = int((free * PLANNED - tokens * WIDEST * widest * itemsize) // row)
    return -(-asked // -(-asked // max(min(fitting, asked), 1)))


def prefilled(model: Any, *texts: Sequence[int]) -> Any:
    """A cache with texts of one length, a row each; whether with gradients, the caller says. Refused without layers."""
    ids = torch.tensor(texts, device=model.device)
    cache = model(ids, **cached(model, empty_cache(model)), logits_to_keep=1)[cache_argument(model)]
    refuse_cache(cache, shape_of(model.config).keeping)
    return cache


class Reader:
    """A model with one text in its cache, or several of one length, a row each.

    What is decoded is cropped from the cache afterwards, so that no question and no policy sees another one's tokens.
    """

    @torch.inference_mode()
    def __init__(self, model: Any, *texts: Sequence[int]) -> None:
        self._model = model
        self._length = len(texts[0])
        self._cache = prefilled(model, *texts)
        self._shape = shape_of(model.config)
        self._ids = torch.tensor(texts, device=model.device)
        tell(self._cache, self._ids)
        self._places: dict[int, Snapshot] = {}
        self.mark()

    @torch.inference_mode()
    def repeat(self, rows: int) -> None:
        """Hold the first row, with what was decoded in it, so many times, for questions that are decoded together."""
        chosen = torch.zeros(rows, dtype=torch.long, device=self._ids.device)
        for layer in self._layers:
            layer.batch_select_indices(chosen)
        Snapshot.of(self._cache, self._shape.keeping, chosen).put_back(self._cache)
        tell(self._cache, self._ids.repeat(rows, 1))
        self.mark()

    @torch.inference_mode()
    def mark(self) -> None:
        """Remember this place, so that `crop` can come back to it; where all layers crop, it can to any place."""
        if self._shape.kinds:
            self._places[self._length + self.decoded] = Snapshot.of(self._cache, self._shape.keeping)

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

    def answers(self, sheet: Sheet, hear: Sequence[Hear], phase: Phase = NEVER) -> Iterator[tuple[int, str]]:
        """Let every row of a sheet answer greedily until its answer ends; its number and text as soon as it does.

        Each step feeds every row its own next token, of its question while it has some: all are at the same slot, and
        none is treated otherwise than alone.
        """
        while known := [len(row.tokens) for row in sheet.rows if row.end is None]:
            # Questions as far as none ends; their last tokens, and answers', one by one.
            together = max(min(known) - self.decoded - 1, 1)
            logits = self.feed_rows(sheet.fed(self.decoded, together), together - 1, phase)
            for number, (row, token) in enumerate(zip(sheet.rows, logits[:, -1].argmax(-1).tolist(), strict=True)):
                if row.end is None and len(row.tokens) == self.decoded:
                    row.tokens.append(token)
                    text, ended = hear[number](row.said)
                    if ended:
                        yield number, text
                        row.end = self.decoded

    def timed(self, tokens: Sequence[int]) -> Iterator[float]:
        """Decode given tokens one by one; seconds of each step."""
        for token in tokens:
            synchronize(self._model.device)
            start = time.perf_counter()
            self.feed((token,))
            synchronize(self._model.device)
            yield time.perf_counter() - start

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
