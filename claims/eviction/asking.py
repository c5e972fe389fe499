"""saccade's side: every policy on the prompts, greedily, to the same length as kvpress's side."""

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

import torch

from saccade.adapters.hf.cache import tell
from saccade.adapters.hf.run import sparsify
from saccade.eval.reader import NEVER, Reader
from saccade.methods.policy import Policy
from saccade.report.labels import family

from .exchange import Cell, Prompt, Said

DENSE = Cell("dense", "dense", None)


PROTOCOLS = ("decoding", "query_aware")


def cell_of(policy: Policy, protocol: str) -> Cell:
    """Dense attention is the one cell that both sides have."""
    if policy.name == "dense":
        return DENSE
    return Cell(family(str(policy)), protocol, policy.budget)


class LongerReader(Reader):
    """A reader whose text can be made longer, densely, and shorter again."""

    def lengthen(self, tokens: Sequence[int]) -> None:
        """Read on."""
        self.feed(tokens)
        self._length += len(tokens)
        self._ids = torch.cat((self._ids, torch.tensor([tokens], device=self._ids.device)), 1)
        tell(self._cache, self._ids)

    def shorten(self, tokens: int) -> None:
        """Forget the last tokens, and whatever follows them."""
        self._length -= tokens
        self._ids = self._ids[:, : self._length]
        self.crop()
        tell(self._cache, self._ids)


class Asking:
    """Prompts under policies; `run` it, then read `said`, which is also right in the middle of it."""

    def __init__(self, model: Any, tokenizer: Any, prompts: Sequence[Prompt], policies: Sequence[Policy]) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._prompts, self._policies = prompts, policies
        self.said: list[Said] = []

    @property
    def _asked(self) -> list[tuple[Policy, str]]:
        """Dense attention is the same under all protocols."""
        return [(policy, name) for policy in self._policies for name in PROTOCOLS[: 1 if policy.name == "dense" else 2]]

    @property
    def units(self) -> int:
        """A policy under one protocol on the prompts of one context."""
        return len({prompt.context for prompt in self._prompts}) * len(self._asked)

    def run(self, advance: Callable[[str], None]) -> None:
        """Ask everything, context by context."""
        numbered = enumerate(self._prompts)
        for context, group in groupby(numbered, key=lambda pair: pair[1].context):
            asked = list(group)
            reader = LongerReader(self._model, context)
            for policy, protocol in self._asked:
                for number, prompt in asked:
                    self.said.append(self._ask(reader, policy, protocol, number, prompt))
                advance(str(policy))

    def _ask(self, reader: LongerReader, policy: Policy, protocol: str, number: int, prompt: Prompt) -> Said:
        # Given tokens are no drafts: nothing verifies them.
        phase = NEVER if policy.rectify is not None and policy.rectify.mode == "verify" else policy.phase
        known = prompt.question if protocol == "query_aware" else ()
        if known:
            reader.lengthen(known)
        try:
            with sparsify(self._model, policy, tokenizer=self._tokenizer) as run, run.decoding():
                logits = reader.feed(((*prompt.question, *prompt.answer_prefix))[len(known) :], phase)
                tokens = [int(logits.argmax())]
                while len(tokens) < prompt.max_new_tokens and tokens[-1] != self._tokenizer.eos_token_id:
                    tokens.append(int(reader.feed(tokens[-1:], phase).argmax()))
                stats = run.stats()
        finally:
            reader.crop()
            reader.shorten(len(known))
        # Of the policy's own steps; where it has dense passes, what they read comes on top.
        read = fmean(layer.tokens for layer in stats.layers)
        return Said(cell_of(policy, protocol), number, round(read, 3), tuple(tokens))
