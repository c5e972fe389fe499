"""Measured time of a decoded token, candidates taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from ..adapters.hf.run import sparsify
from ..eval.reader import Reader
from ..methods.policy import Policy
from .problems import Problem

ROUNDS = 5
STEPS = 8
WARM = 2


def time_per_token(model: Any, tokenizer: Any, problem: Problem, specs: Sequence[str]) -> dict[str, float]:
    """Milliseconds per token of each policy behind a text: the median over rounds; a round of dense passes is whole.

    The questions are the tokens to decode; torch's threads are the caller's business.
    """
    reader = Reader(model, problem.tokens)
    source = [token for ask in problem.asks for token in (*ask.prompt, *ask.answer)]
    turns = [Policy.from_spec(spec) for spec in specs]
    seconds: dict[str, list[float]] = {spec: [] for spec in specs}
    for _ in range(ROUNDS):
        for policy in turns:
            steps = STEPS if policy.rectify is None else policy.phase.period
            tokens = (source * (1 + (steps + WARM) // len(source)))[: steps + WARM]
            try:
                with sparsify(model, policy, tokenizer=tokenizer) as run, run.decoding():
                    measured = list(reader.timed(tokens))[WARM:]
            finally:
                reader.crop()
            seconds[policy.to_spec()].append(median(measured) if policy.rectify is None else fmean(measured))
        turns.reverse()
    return {spec: 1e3 * median(values) for spec, values in seconds.items()}
