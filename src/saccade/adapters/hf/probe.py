"""The probe: a model is told the last tokens of texts, under policies and densely, and nothing is generated.

All that is told is rows of one batch: each begins on what dense attention has left of all before it, and takes one
step, at the price of one for all, or walks some, so that errors add up as they do in an answer.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...checkpoints.shape import shape_of
from ...checkpoints.text import delimiter_table
from ...checkpoints.traffic import expert_weights
from ...checkpoints.versions import cache_argument
from ...methods.policy import Policy
from ...recipes.machine import free_memory
from .cache import tell
from .recorder import Recorder
from .session import lasting
from .shared import PAGE, SharedRows, SharedTexts
from .support import cached, empty_cache

logger = logging.getLogger("saccade")

TOLD, SHORT, KEY, TIMES = 96, 256, 1.0, 4
"""Tokens told; those of a short context; nats by which a key token is likelier with all; budgets in a text at least."""
WALK, FINALISTS = 32, 4
"""Steps in a row by which the best of one step are compared: a clean cache hides errors that add up (`docs/log.md`)."""

READ, FEW = 2**13, 64
"""Tokens of texts that are read by one call; rows of a batch that none leaves before all are at their ends."""

REPLAYED = 4
"""Steps of one shape from which on they are a CUDA graph: one is run to compile, and one more to capture."""

Kind = Literal["natural", "repeat"]
KINDS: tuple[Kind, ...] = ("natural", "repeat")
"""A text as it is; and one that ends with a passage from its middle, word for word."""

Attach = Callable[[Any, Policy, Any], AbstractContextManager[Any]]
"""Of a model, a policy and a tokenizer; `run.attached`."""

_LOGITS, _COPIES, _HELD = 2**26, 5, 4
"""Numbers that the logits of a batch may be, and how often they stand in float32; caches of a text planned with."""


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


@dataclass(frozen=True, slots=True)
class Walk:
    """A row: which text of which kind, its first step, most steps, and those that are measured, by their numbers."""

    text: int
    kind: Kind
    start: int
    steps: int
    measured: tuple[int, ...]


Place = tuple[int, Kind, int]
"""A told token: its text, kind, and number among those told."""


class Probe:
    """Some texts, read densely once, and steps behind them under any policy.

    Args:
        model: in eval mode.
        passages: each at least as long as its `shortest`.
        keys_alone: only key tokens are measured, which costs less.
        attach: attaches a policy to the model; None: it is attached, densely.
        walks: steps that rows may be asked to take.

    Attributes:
        keys: of each text, which told tokens are key tokens, bool `[TOLD]`, by kind.

    Where some layers have no full attention, or read another's keys, steps are separate calls on copies of the cache.
    """

    def __init__(
        self,
        model: Any,
        passages: Sequence[Passage],
        *,
        keys_alone: bool = False,
        attach: Attach | None,
        kinds: Sequence[Kind] = KINDS,
        walks: Sequence[int] = (1, WALK),
    ) -> None:
        self._model, self._passages, self._attach = model, tuple(passages), attach
        self.keys, self._walks, self._caches = list[dict[Kind, Tensor]](), list[Walk](), list[Cache]()
        self._dense = dict[Place, Tensor]()
        shape, rows = shape_of(model.config), list[SharedRows]()
        apart = bool(shape.kinds or shape.sources)
        for together in _of_one_length(self._passages, apart=apart):
            common = [passage.common for passage in together]
            held = self._read(common)
            texts = None if apart else SharedTexts(model, held, common)
            needed = self._needs_long(together, held, texts, kinds)
            for row, keys in enumerate(zip(*needed, strict=True)):
                number, key = len(self.keys), dict(zip(kinds, keys, strict=True))
                here = [
                    one
                    for kind in kinds
                    for steps in walks
                    for one in _walks(number, kind, key[kind], steps, keys_alone=keys_alone)
                ]
                self.keys.append(key)
                self._walks += here
                if texts is None:
                    self._caches.append(held)
                elif here:
                    starts = [[(one.start, one.steps) for one in here if one.kind == kind] for kind in kinds]
                    rows.append(texts.rows(row, starts))
            del held, texts  # or the last ones would lie beside what is joined
        self._rows = SharedRows.joined(rows) if rows else None
        self._few = FEW if model.device.type == "cuda" else 0
        self._most = max(_LOGITS // model.get_input_embeddings().weight.shape[0], 1)

    def measure(
        self, policy: Policy, tokenizer: Any = None, *, walk: int = 1, every: int = 1
    ) -> list[dict[Kind, Told]]:
        """What a policy makes of the tokens told, of each text by kind, where rows take `walk` steps.

        Of these rows one in `every` is measured. The policy's rectification is left out. As many rows step at once as
        there is memory for.
        """
        while True:
            try:
                return self._measured(policy, tokenizer, walk, every)
            except torch.OutOfMemoryError:
                most = min(self._most, sum(one.steps == walk for one in self._walks)) // 2
                if most == 0 or self._rows is None:
                    raise
            logger.warning("probe: out of memory, so %d tokens are told at once", most)
            self._most = most

    def _measured(self, policy: Policy, tokenizer: Any, walk: int, every: int) -> list[dict[Kind, Told]]:
        self._read_densely(walk)
        places, found = list[Place](), list[Tensor]()
        for here, logits in self._steps(policy, tokenizer, walk, every):
            dense = torch.stack([self._dense[place] for place in here])
            wanted = [self._passages[text].told(kind)[place] for text, kind, place in here]
            reference, said = (one.float().log_softmax(-1) for one in (dense, logits))
            divergence = (reference.exp() * (reference - said)).sum(-1).clamp(min=0)
            likelihood = -said.gather(1, torch.tensor(wanted, device=said.device)[:, None])[:, 0]
            equal = reference.argmax(-1) == said.argmax(-1)
            found.append(torch.stack((divergence, likelihood, equal.float())))
            places += here
        values = torch.cat(found, 1).double().cpu() if found else torch.zeros(3, 0, dtype=torch.float64, device="cpu")
        at = {place: column for column, place in enumerate(places)}
        results = list[dict[Kind, Told]]()
        for text, keys in enumerate(self.keys):
            told = dict[Kind, Told]()
            for kind, key in keys.items():
                chosen = [place for place in range(len(key)) if (text, kind, place) in at]
                divergence, likelihood, equal = values[:, [at[text, kind, place] for place in chosen]]
                told[kind] = Told(divergence, likelihood, equal.bool(), key.cpu()[chosen])
            results.append(told)
        return results

    def _read_densely(self, walk: int) -> None:
        """Dense logits behind what rows of so many steps measure; those of one step serve for all: no error adds up."""
        asked = [one for one in self._walks if one.steps == walk]
        if all((one.text, one.kind, one.start + step) in self._dense for one in asked for step in one.measured):
            return
        for here, logits in self._steps(Policy.from_spec("dense"), None, min(one.steps for one in self._walks)):
            self._dense |= dict(zip(here, logits, strict=True))

    def _steps(self, policy: Policy, tokenizer: Any, walk: int, every: int = 1) -> Iterator[tuple[list[Place], Tensor]]:
        """What is measured, and logits `[n, V]` behind it: some of it after the other, in the same order always."""
        if self._rows is None:
            yield from self._separate_steps(policy, tokenizer, walk, every)
            return
        rows, walks = self._rows, self._walks
        asked = [row for row, one in enumerate(walks) if one.steps == walk][::every]
        rows.plan = clean(policy).plan(shape_of(self._model.config))
        reads = rows.plan.reads_text and tokenizer is not None
        rows.levels = delimiter_table(tokenizer, rows.plan.codes) if reads else None
        with nullcontext() if self._attach is None else self._attach(self._model, Policy.from_spec("dense"), None):
            for first in range(0, len(asked), self._most):
                for going, steps in self._stretches(asked[first : first + self._most]):
                    for step, logits in zip(steps, self._stepped(rows, going, steps), strict=True):
                        measured = [place for place, row in enumerate(going) if step in walks[row].measured]
                        if measured:
                            here = (walks[going[place]] for place in measured)
                            yield [(one.text, one.kind, one.start + step) for one in here], logits[measured]

    def _stretches(self, going: list[int]) -> Iterator[tuple[list[int], range]]:
        """Which rows take which steps together: those at their end leave once they are half of a batch that is not
        small, whose shape kernels are compiled by."""
        start, last = 0, {row: self._walks[row].measured[-1] for row in going}
        while going:
            middle = (len(going) - 1) // 2 if len(going) > self._few else -1
            stop = sorted(last[row] for row in going)[middle] + 1
            yield going, range(start, stop)
            start, going = stop, [row for row in going if last[row] >= stop]

    @torch.no_grad()
    def _stepped(self, rows: SharedRows, going: list[int], steps: range) -> Iterator[Tensor]:
        """Logits `[n, V]` behind each step of some rows, in memory that the next may overwrite."""
        if len(steps) < REPLAYED or not self._captured(rows):
            for step in steps:
                yield self._step(rows.part(going, step))
            return
        recorder, counted = Recorder(rows.ids.device), rows.part(going, steps.start).uncounted(len(steps))

        def call() -> Tensor:
            logits = self._step(counted.uncounted())
            counted.rows.seq_lens.add_(1)
            return logits

        with recorder.here():
            yield recorder.rehearse(call)
            replay, logits = recorder.record(call)
            for _ in steps[1:]:
                replay()
                yield logits

    def _captured(self, rows: SharedRows) -> bool:
        """Whether a device can take steps alone: no index, no experts, no angles that grow, no weights elsewhere."""
        config, places = self._model.config.get_text_config(), getattr(self._model, "hf_device_map", {}).values()
        angles = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
        asks = expert_weights(self._model) or "dynamic" in angles or "longrope" in angles or len({*places}) > 1
        return rows.ids.device.type == "cuda" and not (asks or rows.plan.owns_index or rows.plan.bounds_page)

    @torch.no_grad()
    def _separate_steps(
        self, policy: Policy, tokenizer: Any, walk: int, every: int
    ) -> Iterator[tuple[list[Place], Tensor]]:
        """The same, a call for each."""
        device = self._model.device
        for one in [row for row in self._walks if row.steps == walk][::every]:
            assert self._attach is not None, "layers of other kinds are not probed on a prompt"
            passage, held = self._passages[one.text], copy.deepcopy(self._caches[one.text])
            fed = passage.fed(one.kind)
            ids = torch.tensor([fed], device=device)
            if one.start:
                self._model(ids[:, : one.start], **cached(self._model, held))
            tell(held, torch.tensor([(*passage.common, *fed[: one.start])], device=device))
            with self._attach(self._model, clean(policy), tokenizer):
                for step in range(one.measured[-1] + 1):
                    place = one.start + step
                    logits = self._model(ids[:, place : place + 1], **cached(self._model, held)).logits[:, -1]
                    if step in one.measured:
                        yield [(one.text, one.kind, place)], logits

    @torch.no_grad()
    def _step(self, rows: SharedRows) -> Tensor:
        inputs = {"position_ids": rows.positions, **cached(self._model, rows)}
        logits: Tensor = self._model(rows.ids, **inputs).logits[:, -1]
        return logits

    def _read(self, texts: Sequence[Sequence[int]]) -> Cache:
        """The cache of texts of one length."""
        with lasting():
            held = empty_cache(self._model)
            ids = torch.tensor(texts, device=self._model.device)
            read: Cache = self._model(ids, **cached(self._model, held), logits_to_keep=1)[cache_argument(self._model)]
            return read

    @torch.no_grad()
    def _needs_long(
        self, passages: Sequence[Passage], held: Cache, texts: SharedTexts | None, kinds: Sequence[Kind]
    ) -> list[Tensor]:
        """Of each kind, which told tokens are likelier with all of a text before them than with its end; bool
        `[texts, TOLD]`."""
        end = self._read([(*passage.tokens[: passage.start], *passage.common[1 - SHORT :]) for passage in passages])
        found = list[Tensor]()
        for kind in kinds:
            fed = [passage.fed(kind) for passage in passages]
            read = self._behind(held, fed) if texts is None else texts.follow(fed)
            wanted = torch.tensor([passage.told(kind) for passage in passages], device=read.device)
            # A text at a time: all words of all texts in float32 are much.
            both = zip(self._behind(end, fed), read, wanted, strict=True)
            gains = [_said(long, tokens) - _said(near, tokens) for near, long, tokens in both]
            found.append(torch.gt(torch.stack(gains), KEY))
        return found

    def _behind(self, held: Cache, fed: Sequence[Sequence[int]]) -> Tensor:
        """Dense logits `[texts, n, V]` behind what is fed after a cache, which stays as it is."""
        ids = torch.tensor(fed, device=self._model.device)
        logits: Tensor = self._model(ids, **cached(self._model, copy.deepcopy(held))).logits
        return logits


def _said(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logarithms of tokens' likelihoods `[n]` in logits `[n, V]`."""
    return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def texts_that_fit(model: Any, tokens: int) -> int:
    """Texts of so many tokens that a probe reads at once: with their rows' own pages, and all logits of dense steps."""
    free, itemsize = free_memory(model.device), model.dtype.itemsize
    told, vocabulary = TOLD * len(KINDS), model.get_input_embeddings().weight.shape[0]
    held = _HELD * (tokens + told * PAGE) * shape_of(model.config).token_bytes(itemsize)
    held += 2 * told * vocabulary * itemsize
    return 1 if free is None else max(int((free - 4 * _COPIES * _LOGITS) // held), 1)


def _of_one_length(passages: Sequence[Passage], *, apart: bool) -> Iterator[Sequence[Passage]]:
    """Neighbours that one call reads: of one length, and no more tokens than `READ`; each alone where it is longer, or
    all are to be `apart`."""
    for (length, _), same in groupby(passages, key=lambda passage: (len(passage.tokens), passage.start)):
        alike, most = [*same], 1 if apart else max(READ // length, 1)
        yield from (alike[first : first + most] for first in range(0, len(alike), most))


def _walks(text: int, kind: Kind, key: Tensor, steps: int, *, keys_alone: bool) -> Iterator[Walk]:
    """The rows of a text: each begins where another ends, and those that would measure nothing are left out."""
    wanted = key.tolist() if keys_alone else [True] * len(key)
    for start in range(0, len(wanted), steps):
        measured = tuple(step for step, one in enumerate(wanted[start : start + steps]) if one)
        if measured:
            yield Walk(text, kind, start, steps, measured)


def clean(policy: Policy) -> Policy:
    """A policy without its rectification."""
    if policy.rectify is None:
        return policy
    return replace(policy, options=policy.options.model_copy(update={"rectify": None}))
