"""A dense reading of a text: the keys of all its tokens, and the model's own queries where they are asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from saccade.adapters.hf.run import sparsify
from saccade.methods.policy import Policy
from saccade.plans.roles import HeadSpan
from saccade.types import KVView, Rows, Selection, Softmax

_PIECE = 1024  # tokens of a dense call


@dataclass
class Reading:
    """What attention saw, RoPE applied.

    Attributes:
        tokens: int64 `[1, N]`.
        keys: of each layer `[1, N, Hkv, d]`.
        queries: `[1, Hq, d]` by length of the row, the query's own token included, and layer.
        softmaxes: of each layer.
    """

    tokens: Tensor
    keys: list[Tensor] = field(default_factory=list)
    queries: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    softmaxes: dict[int, Softmax] = field(default_factory=dict)

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        """See `Observer`: dense attention shows all heads of a layer at once."""
        self.queries[int(kv.rows.seq_lens[0]), layer] = q.clone()
        self.softmaxes[layer] = softmax

    def rows(self, length: int) -> Rows:
        """The row when it had so many tokens."""
        return Rows.on_host(torch.zeros((1, 1), dtype=torch.int32, device=self.tokens.device), [0], [length])

    def view(self, layer: int, rows: Rows) -> KVView:
        """A layer's keys at that time, without those that follow."""
        keys = self.keys[layer][:, : rows.max_len]
        return KVView(keys, keys, rows)


@torch.inference_mode()
def read(model: Any, tokens: Sequence[int], watched: Sequence[int], advance: Callable[[str], None]) -> Reading:
    """Read a text densely; wherever one of `watched` tokens were read, in ascending order, keep the next one's queries.

    `advance` is called after every one of them.
    """
    reading = Reading(torch.tensor([list(tokens)], device=model.device))
    cache: Any = DynamicCache()
    done = 0
    with sparsify(model, Policy.from_spec("dense"), observers=(reading,)) as run:

        def feed(stop: int) -> None:
            nonlocal done
            model(reading.tokens[:, done:stop], past_key_values=cache, use_cache=True, logits_to_keep=1)
            done = stop

        for before in watched:
            while done < before:
                feed(min(done + _PIECE, before))
            with run.decoding():
                feed(before + 1)
            advance(f"dense reading, {before:,} tokens")
    reading.keys = [layer.keys.transpose(1, 2).contiguous() for layer in cache.layers]
    return reading
