"""The probe: a model is told the last tokens of a text, under policies and densely, and nothing is generated.

Each token is a decode step of its own on what dense attention has left of those before it, and all are rows of one
batch: the chance that a policy's step stands, at the price of one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...checkpoints.shape import shape_of
from ...checkpoints.text import delimiter_table
from ...checkpoints.versions import cache_argument
from ...methods.policy import Policy
from .cache import tell
from .session import lasting
from .shared import SharedRows, SharedText
from .support import cached, empty_cache

logger = logging.getLogger("saccade")

TOLD, SHORT, KEY, TIMES = 96, 256, 1.0, 4
"""Tokens told; those of a short context; nats by which a key token is likelier with all; budgets in a text at least."""

Kind = Literal["natural", "repeat"]
KINDS: tuple[Kind, ...] = ("natural", "repeat")
"""A text as it is; and one that ends with a passage from its middle, word for word."""

Attach = Callable[[Any, Policy, Any], AbstractContextManager[Any]]
"""Of a model, a policy and a tokenizer; `run.attached`."""

_LOGITS = 2**28
"""Numbers that the logits of a batch may be."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text whose last tokens are told.

    Attributes:
        tokens: with those that the tokenizer begins every text with; `start` is how many.
    """

    tokens: tuple[int, ...]
    start: int = 0

    @property
    def shortest(self) -> int:
        """What it must have: a passage in its middle is neither told nor in the short context."""
        return self.start + 2 * SHORT + 3 * TOLD + 1

    @property
    def common(self) -> tuple[int, ...]:
        """What is read before the first token that is fed."""
        return self.tokens[: -TOLD - 1]

    def told(self, kind: Kind) -> tuple[int, ...]:
        """The tokens that are told."""
        if kind == "natural":
            return self.tokens[-TOLD:]
        middle = (len(self.tokens) - TOLD) // 2
        return self.tokens[middle : middle + TOLD]

    def fed(self, kind: Kind) -> tuple[int, ...]:
        """The tokens behind which these are expected."""
        return (self.tokens[-TOLD - 1], *self.told(kind)[:-1])


@dataclass(frozen=True, slots=True)
class Told:
    """What a policy made of the tokens told of one kind of text, each float64 or bool `[n]`.

    Attributes:
        divergence: KL(dense ‖ policy) in nats.
        likelihood: negative log-likelihood of the token, nats.
        equal: the likeliest token is dense attention's.
        key: what needs a long context: dense attention finds it likelier, by `KEY` nats, than with `SHORT` tokens.
    """

    divergence: Tensor
    likelihood: Tensor
    equal: Tensor
    key: Tensor


class Probe:
    """One text, read densely once, and steps behind it under any policy.

    Args:
        model: in eval mode.
        passage: at least as long as its `shortest`.
        keys_alone: only key tokens are told, which costs less.
        attach: attaches a policy to the model; None: it is attached, densely.

    Attributes:
        key: which told tokens are key tokens, bool `[TOLD]`, by kind.

    Where some layers have no full attention, or read another's keys, steps are separate calls on copies of the cache.
    """

    def __init__(
        self,
        model: Any,
        passage: Passage,
        *,
        keys_alone: bool = False,
        attach: Attach | None,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self._model, self._passage, self.kinds = model, passage, tuple(kinds)
        shape = shape_of(model.config)
        self._held, self._attach = self._read(), attach
        text = None if shape.kinds or shape.sources else SharedText(model, self._held, passage.common)
        with torch.no_grad():
            self.key = {kind: self._needs_long(text, kind) for kind in self.kinds}
        chosen = [key.nonzero()[:, 0].tolist() if keys_alone else [*range(TOLD)] for key in self.key.values()]
        self._at = dict(zip(self.kinds, chosen, strict=True))
        self._shares = text is not None
        self._rows = None if text is None or not any(chosen) else text.rows(chosen)
        self._dense: list[Tensor] | None = None
        self._split(max(_LOGITS // model.get_input_embeddings().weight.shape[0], 1))

    def measure(self, policy: Policy, tokenizer: Any = None) -> dict[Kind, Told]:
        """What a policy makes of the tokens told, by kind of text.

        Its rectification is left out: every step is the first behind a clean cache.
        """
        if self._dense is None:
            self._dense = self._densely()
        told = [self._passage.told(kind)[at] for kind in self.kinds for at in self._at[kind]]
        wanted = torch.tensor(told, device=self._model.device)
        found, first = list[tuple[Tensor, ...]](), 0
        for part, logits in enumerate(self._steps(policy, tokenizer)):
            dense = self._dense[part].float().log_softmax(-1)
            here = logits.float().log_softmax(-1)
            target = wanted[first : first + len(here)][:, None]
            first += len(here)
            divergence = (dense.exp() * (dense - here)).sum(-1).clamp(min=0)
            equal = dense.argmax(-1) == here.argmax(-1)
            found.append((divergence, -here.gather(1, target)[:, 0], equal))
        divergence, likelihood, equal = (
            (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
            if found
            else 3 * [torch.zeros(0, device="cpu")]
        )
        results, first = dict[Kind, Told](), 0
        for kind, places in self._at.items():
            of = slice(first, first + len(places))
            key = self.key[kind][places].cpu()
            results[kind] = Told(divergence[of].double(), likelihood[of].double(), equal[of].bool(), key)
            first = of.stop
        return results

    def _steps(self, policy: Policy, tokenizer: Any) -> Iterator[Tensor]:
        """Logits `[b, V]` of some rows after the others."""
        if not self._shares:
            yield from self._separate_steps(policy, tokenizer)
            return
        plan = clean(policy).plan(shape_of(self._model.config))
        levels = delimiter_table(tokenizer) if plan.reads_text and tokenizer is not None else None
        with nullcontext() if self._attach is None else self._attach(self._model, Policy.from_spec("dense"), None):
            for part in self._parts:
                part.plan, part.levels = plan, levels
                yield self._step(part)

    def _densely(self) -> list[Tensor]:
        """The same of dense attention, as many rows at once as there is memory for."""
        try:
            return [*self._steps(Policy.from_spec("dense"), None)]
        except torch.OutOfMemoryError:
            most = self._parts[0].rows.batch // 2 if self._parts else 0
            if most == 0:
                raise
        logger.warning("probe: out of memory, so %d tokens are told at once", most)
        self._split(most)
        return self._densely()

    def _split(self, most: int) -> None:
        """Tell at most so many tokens at once."""
        count = 0 if self._rows is None else self._rows.rows.batch
        self._parts = (
            [self._rows.part(first, min(first + most, count)) for first in range(0, count, most)] if self._rows else []
        )

    @torch.no_grad()
    def _separate_steps(self, policy: Policy, tokenizer: Any) -> Iterator[Tensor]:
        """The same, a call for each."""
        assert self._attach is not None, "layers of other kinds are not probed on a prompt"
        for kind, places in self._at.items():
            held, fed = copy.deepcopy(self._held), self._passage.fed(kind)
            for place, token in enumerate(fed):
                ids = torch.tensor([[token]], device=self._model.device)
                if place in places:
                    twin = copy.deepcopy(held)
                    tell(twin, torch.tensor([(*self._passage.common, *fed[:place])], device=self._model.device))
                    with self._attach(self._model, clean(policy), tokenizer):
                        yield self._model(ids, **cached(self._model, twin)).logits[:, -1]
                self._model(ids, **cached(self._model, held))

    @torch.no_grad()
    def _step(self, rows: SharedRows) -> Tensor:
        inputs = {"position_ids": rows.positions, **cached(self._model, rows)}
        logits: Tensor = self._model(rows.ids, **inputs).logits[:, -1]
        return logits

    def _read(self) -> Cache:
        """The cache of what is common."""
        ids = torch.tensor([self._passage.common], device=self._model.device)
        with lasting():
            held = empty_cache(self._model)
            read: Cache = self._model(ids, **cached(self._model, held), logits_to_keep=1)[cache_argument(self._model)]
            return read

    def _needs_long(self, text: SharedText | None, kind: Kind) -> Tensor:
        """Which told tokens are likelier with the whole text before them than with its last tokens."""
        fed, told, start = self._passage.fed(kind), self._passage.told(kind), self._passage.start
        ids = (*self._passage.tokens[:start], *self._passage.common[1 - SHORT :], *fed)
        short = self._model(torch.tensor([ids], device=self._model.device), use_cache=False, logits_to_keep=TOLD)
        wanted = torch.tensor(told, device=self._model.device)[:, None]
        if text is None:
            behind = torch.tensor([fed], device=self._model.device)
            read = self._model(behind, **cached(self._model, copy.deepcopy(self._held))).logits[0]
        else:
            read = text.follow(fed)
        long, alone = (one.float().log_softmax(-1).gather(1, wanted)[:, 0] for one in (read, short.logits[0]))
        return torch.gt(long - alone, KEY)


def clean(policy: Policy) -> Policy:
    """A policy without its rectification."""
    if policy.rectify is None:
        return policy
    return replace(policy, options=policy.options.model_copy(update={"rectify": None}))
