"""Exact scores: q·k of every cached token, which dense attention computes anyway (TidalDecode, section 3.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.dense_decode_scores.api import decode_scores
from ...types import KVView, Pooling
from ..costs import Bytes
from ..index import Index
from ..selector import Scorer


@dataclass(frozen=True, slots=True)
class ExactScorer(Scorer):
    """Scores tokens by q·k in float32 from the cached keys, or a page of `unit` by its best token; needs no index.

    Blocks of 64 are LycheeDecode's speed path (section 4.3), single tokens its accuracy path.
    """

    pooling: Pooling = "max"
    unit: int = 1
    fused = True

    def score(self, q: Tensor, kv: KVView, index: Index | None, stored: Tensor | None = None) -> Tensor:
        """Scores `[B, G, ceil(max_len / unit)]` of pages that start at logical position 0; -inf past the row."""
        scores = decode_scores(q, kv, pooling=self.pooling) if stored is None else stored
        if self.unit == 1:
            return scores
        if stored is not None:
            # Behind a row's end dense attention has stored nothing.
            absent = torch.arange(scores.shape[-1], device=q.device) >= kv.rows.seq_lens[:, None]
            scores = scores.masked_fill(absent[:, None], -torch.inf)
        padded = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % self.unit), value=-torch.inf)
        return padded.view(*scores.shape[:2], -1, self.unit).amax(dim=-1)

    def traffic(self, length: int, head_dim: int, itemsize: float) -> Bytes:
        return Bytes(read=length * head_dim * itemsize)
