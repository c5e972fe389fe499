"""How many of a head's best tokens are those of the same head one layer above, while plain text is read densely."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lab.packages import stretches
from saccade.adapters.hf.run import sparsify
from saccade.eval.reader import Reader
from saccade.kernels.dense_decode_scores.api import decode_scores
from saccade.kernels.topk.api import topk
from saccade.plans.roles import HeadSpan
from saccade.types import KVView, Selection, Softmax

from ..judging.claim import Sample
from ..judging.study import Study
from .texts import OfTexts

KEY = ("text",)


@dataclass(frozen=True, slots=True)
class Overlap(OfTexts):
    """Stretches of packages' sources that share no token; their last tokens are decoded densely, one at a time.

    An arm is `layer L`. The overlap of a query head H is the share of its best tokens by q·k that are among the best of
    head H of the next layer with full attention; `range` is that of the layer's head with most minus that with least,
    which the even steps choose and the odd ones tell.

    Attributes:
        best: tokens of a head that are compared.
        length: tokens of a text before those decoded.
        decoded: last tokens.
        texts: how many.
        seed: where the first text begins.
    """

    best: int = 5
    length: int = 1024
    decoded: int = 16
    texts: int = 24
    seed: int = 20

    def units(self, study: Study) -> int:
        return self.texts

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        subject = study.subject
        texts = stretches(subject.tokenizer, self.length + self.decoded, self.texts, self.seed, subject.positions)
        about = {name: getattr(self, name) for name in ("best", "length", "decoded", "texts", "seed")}
        with study.samples(about, KEY) as ledger:
            for number, tokens in enumerate(texts):
                if (number,) not in ledger.records:
                    ledger.add({"text": number, "ranges": self._read(study.loaded, tokens)})
                    advance(f"text {number + 1}")
            records = [ledger.records[number,] for number in range(self.texts)]
        return [
            Sample(str(record["text"]), arm, {"range": value})
            for record in records
            for arm, value in record["ranges"].items()
        ]

    def _read(self, model: Any, tokens: Sequence[int]) -> dict[str, float]:
        seen = _BestTokens(self.best)
        reader = Reader(model, tokens[: self.length])
        with sparsify(model, "dense", observers=(seen,)) as run, run.decoding():
            for token in tokens[self.length :]:
                reader.feed((token,))
        return {
            f"layer {layer}": round(_range(torch.stack(ids), torch.stack(above)), 6)
            for (layer, ids), (_, above) in pairwise(seen.layers.items())
        }


class _BestTokens:
    """Observes every query head's best tokens `[Hq, best]`, layer by layer and step by step."""

    def __init__(self, best: int) -> None:
        self._best = best
        self.layers: dict[int, list[Tensor]] = {}

    def observe(
        self, layer: int, span: HeadSpan, q: Tensor, kv: KVView, selection: Selection | None, softmax: Softmax
    ) -> None:
        ids, _ = topk(decode_scores(q, kv, pooling="each"), kv.rows.seq_lens, self._best, order="position")
        self.layers.setdefault(layer, []).append(ids[0].cpu())


def _range(ids: Tensor, above: Tensor) -> float:
    """How far apart heads are in the share of `ids` `[steps, heads, best]` that is in `above`."""
    shared = (ids[..., None] == above[..., None, :]).any(-1).float().mean(-1)
    chosen, told = shared[::2].mean(0), shared[1::2].mean(0)
    return float(told[chosen.argmax()] - told[chosen.argmin()])
