"""A policy whose layer nobody has found for a model: the probe finds it on the first long prompt, and it is kept."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import PolicyError, SaccadeError
from ...methods.policy import Policy
from ...plans.plan import candidates
from ...recipes.kept import keep, with_layers
from ...recipes.recipe import Recipe
from ...types import ModelShape
from .call import Callers
from .probe import FINALISTS, KINDS, TIMES, WALK, Passage, Probe, texts_that_fit

logger = logging.getLogger("saccade")

LEAST, SURE = 4096, 3
"""Tokens of a prompt that is looked at; standard errors by which the better of two is clear."""


class Effort(NamedTuple):
    """What a first prompt pays for: passages read, one in `every` key tokens of one step, and layers that then walk."""

    passages: int
    every: int
    finalists: int


ON_GPU, ON_CPU = Effort(4, 1, FINALISTS), Effort(2, 2, FINALISTS - 1)
"""A GPU takes about as long for twice as much; a CPU would take more than a quarter of a prompt of 16K."""

Losses = dict[tuple[int, ...], Tensor]
"""By layers, KL of every key token over the number of its kind, float64 `[keys]`; the best first."""


@dataclass(slots=True, eq=False)
class Finding:
    """What looks for the layer of a policy that needs one, once; until then the model decodes densely.

    Attributes:
        found: the policy with its layer; None before.
        about: how it was found, JSON-ready.
    """

    model: Any
    policy: Policy
    shape: ModelShape
    tokenizer: Any
    callers: Callers
    found: Policy | None = None
    about: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        """Tokens of a passage."""
        return max(TIMES * (self.policy.budget or 0), Passage((), 1).shortest)

    @property
    def least(self) -> int:
        return max(LEAST, self.length)

    @property
    def _effort(self) -> Effort:
        return ON_CPU if self.model.device.type == "cpu" else ON_GPU

    @property
    def note(self) -> str:
        """What whoever attaches the policy should know."""
        until = f"the probe has found one, on a prompt of {self.least:,} tokens"
        return f"{self.policy}: no layer is known for this model; it decodes densely until {until}"

    def look(self, ids: Tensor, mask: Any) -> bool:
        """Look for the layer on a prompt int64 `[B, n]`, if it is long enough; whether it was found."""
        real = mask[:, -ids.shape[1] :].bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        row = 0 if real is None else int(real.sum(-1).argmax())
        tokens = ids[row] if real is None else ids[row][real[row]]
        # Masks of other forms do not say where a row's padding ends.
        if len(tokens) < self.least or (real is None and mask is not None and len(ids) > 1):
            return False
        begun = time.perf_counter()
        plain = {"prompt": None, "decoding": False, "starts": None, "purpose": "plain", "ending": None, "text": None}
        try:
            with self.callers.knowing(**plain):
                losses = self._losses(self._passages(tokens.tolist()))
        except torch.OutOfMemoryError as error:
            logger.warning("probe: %s; it decodes densely until the next long prompt", str(error).partition("\n")[0])
            return False
        keys = next(iter(losses.values())).shape[-1]
        seconds = time.perf_counter() - begun
        if not keys:
            logger.warning("probe: no token of this prompt needs a long context; the next long one is looked at")
            return False
        best, second = (*losses, *losses)[:2]
        gain = losses[second] - losses[best]
        clear = len(gain) > 1 and bool(gain.sum() > SURE * gain.std() * len(gain) ** 0.5)
        self.found = with_layers(self.policy, best)
        told = f"layer {'+'.join(map(str, best)) or 'none'} selects again"
        than = "" if clear or second == best else f", not clearly better than {'+'.join(map(str, second)) or 'none'}"
        self.about = {"by": "the probe on a prompt", "key_tokens": keys, "second": list(second), "clear": clear}
        logger.warning("%s: %s%s (%d key tokens, %.1f s)%s", self.policy, told, than, keys, seconds, self._keep())
        return True

    def recipe(self) -> Recipe:
        """What was found, or a PolicyError before."""
        if self.found is None:
            raise PolicyError(f"{self.note}; there is none yet: name one, reselect=LAYER, or calibrate layers")
        layers = tuple(self.found.options.model_dump()["reselect"])
        return Recipe(self.shape, self.found, layers, found={"sparsify": self.about})

    def _passages(self, tokens: list[int]) -> list[Passage]:
        """Of the prompt and, where there is a tokenizer, of Python's reference in turn, from their ends."""
        texts, step = [tokens], self.length - 1
        most = max(min(self._effort.passages, texts_that_fit(self.model, self.length)), ON_CPU.passages)
        if self.tokenizer is not None:
            reference = "\n\n".join(topics.values())[: 8 * self.length * most]
            texts.append(self.tokenizer(reference, verbose=False)["input_ids"])
        ends = [(text, len(text) - number * step) for number in range(most) for text in texts]
        return [Passage((text[0], *text[stop - step : stop]), start=1) for text, stop in ends if stop > step][:most]

    def _losses(self, passages: list[Passage]) -> Losses:
        """Of the finalists, who are best by one step, what steps in a row lose behind these passages."""
        probe, effort = Probe(self.model, passages, keys_alone=True, attach=None), self._effort
        tried: Iterable[tuple[int, ...]] = candidates(self.shape, int(self.policy.options.model_dump()["dense_layers"]))
        losses: Losses = {}
        for walk, every in ((1, effort.every), (WALK, 1)):
            losses = {one: self._lost(probe, one, walk, every) for one in tried}
            losses = dict(sorted(losses.items(), key=lambda item: float(item[1].sum())))
            tried = [*losses][: effort.finalists]
        return losses

    def _lost(self, probe: Probe, layers: tuple[int, ...], walk: int, every: int) -> Tensor:
        told = probe.measure(with_layers(self.policy, layers), walk=walk, every=every)
        kinds = (torch.cat([text[kind].divergence for text in told]) for kind in KINDS)
        return torch.cat([kind / max(len(kind), 1) for kind in kinds])

    def _keep(self) -> str:
        """Keep the recipe in the user's cache; says where."""
        try:
            path = keep(self.recipe(), self.policy)
        except (OSError, SaccadeError) as error:
            return f"; not kept: {error}"
        return "" if path is None else f"; kept in {path}"
