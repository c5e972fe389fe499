"""Where dense attention finds an answer: its mass on the answer's tokens in the text, head by head."""

from collections.abc import Sequence

import torch

from ..decode.recall import dense_weights
from ..eval.sheet import AnswerObserver, AnswerStep
from ..kernels.dense_decode_scores.api import decode_scores


class GoldObserver(AnswerObserver):
    """Sums over the answers' tokens, per layer and query head; questions whose answer lies nowhere are left out.

    `first` is the first layer with full attention; those without have zeros.

    Attributes:
        mass: softmax mass on the gold tokens, float64 `[L, Hq]`.
        copies: steps at which the most attended token is a gold one and the very token that comes next (the retrieval
            score of Wu et al., 2025, arXiv 2404.15574), float64 `[L, Hq]`.
        steps: answer tokens counted.
    """

    def __init__(self, layers: int, query_heads: int, tokens: Sequence[int], first: int = 0) -> None:
        self.mass = torch.zeros(layers, query_heads, dtype=torch.float64, device="cpu")
        self.copies = torch.zeros(layers, query_heads, dtype=torch.float64, device="cpu")
        self.steps = 0
        self._tokens, self._first = tokens, first

    def see(self, step: AnswerStep) -> None:
        weights = dense_weights(decode_scores(step.q, step.kv, pooling="each"), step.softmax)
        best = weights.argmax(-1).tolist()
        for row, asked in enumerate(self.sheet.rows):
            if not step.rows[row] or asked.span is None:
                continue
            first, stop = asked.span
            following = asked.tokens[step.position + 1]
            self.mass[step.layer] += weights[row, :, first:stop].sum(-1).double().cpu()
            hits = [first <= at < stop and self._tokens[at] == following for at in best[row]]
            self.copies[step.layer] += torch.tensor(hits, dtype=torch.float64, device="cpu")
            self.steps += step.layer == self._first
