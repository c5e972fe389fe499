"""saccade's side: every policy on the prompts, greedily, to the same length as kvpress's side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from saccade.adapters.hf.run import sparsify
from saccade.eval.reader import NEVER, Reader
from saccade.methods.policy import Policy

from .exchange import Cell, Prompt, Said

DENSE = Cell("dense", "dense", None)


def cell_of(policy: Policy) -> Cell:
    """Dense attention is the one cell that both sides have."""
    spec = str(policy)
    if policy.name == "dense":
        return DENSE
    name, _, given = spec.partition(":")
    options = ",".join(part for part in given.split(",") if part and not part.startswith("budget="))
    return Cell(f"{name}:{options}" if options else name, "decoding", policy.budget)


class Asking:
    """Prompts under policies; `run` it, then read `said`, which is also right in the middle of it."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], policies: Sequence[Policy]) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._prompts, self._policies = prompts, policies
        self.said: list[Said] = []

    @property
    def units(self) -> int:
        """A policy on the prompts of one context."""
        return len({prompt.context for prompt in self._prompts}) * len(self._policies)

    def run(self, advance: Callable[[str], None]) -> None:
        """Ask everything, context by context."""
        numbered = enumerate(self._prompts)
        for context, group in groupby(numbered, key=lambda pair: pair[1].context):
            asked = list(group)
            reader = Reader(self._model, context)
            for policy in self._policies:
                self.said += self._ask(reader, policy, asked)
                advance(str(policy))

    def _ask(self, reader: Reader, policy: Policy, asked: Sequence[tuple[int, Prompt]]) -> Iterator[Said]:
        # Given tokens are no drafts: nothing verifies them.
        phase = NEVER if policy.rectify is not None and policy.rectify.mode == "verify" else policy.phase
        for number, prompt in asked:
            with sparsify(self._model, policy, tokenizer=self._tokenizer) as run, run.decoding():
                try:
                    logits = reader.feed((*prompt.question, *prompt.answer_prefix), phase)
                    tokens = [int(logits.argmax())]
                    while len(tokens) < prompt.max_new_tokens and tokens[-1] != self._tokenizer.eos_token_id:
                        tokens.append(int(reader.feed(tokens[-1:], phase).argmax()))
                    stats = run.stats()
                finally:
                    reader.crop()
            # Of the policy's own steps; where it has dense passes, what they read comes on top.
            read = fmean(layer.tokens for layer in stats.layers)
            yield Said(cell_of(policy), number, round(read, 3), tuple(tokens))
