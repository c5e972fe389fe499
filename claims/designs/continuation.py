"""Plain text decoded with its own tokens behind a dense prompt: their likelihood and both recalls, with position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from saccade.adapters.hf.run import sparsify
from saccade.calibrate.problems import Problem
from saccade.calibrate.sweep import KEY, Sweep
from saccade.checkpoints.shape import shape_of
from saccade.decode.recall import RecallObserver
from saccade.errors import DocumentError
from saccade.eval.reader import Reader
from saccade.eval.tokens import TokenizedText, encode
from saccade.methods.policy import Policy

from ..judging.claim import Sample, Values
from ..judging.effects import TEXTS
from ..judging.study import Study
from .packages import Packages

PARTS = 4
"""Equal parts of what is decoded; `MEASURE@1` is the first one's, `MEASURE@4` the last one's."""
_TOGETHER = 256  # tokens of a call, each of which chooses for itself
_SPARE = 1.25  # of characters: a piece of text is a little more or fewer tokens than the corpus counted


@dataclass(frozen=True, slots=True)
class Continuation:
    """Stretches of packages' sources that share no token; what follows the prompt is fed token by token.

    Measures, of all that is decoded and of its parts: `loss`, mean negative log-likelihood of the next token; `right`,
    how often it is the likeliest; `attention` and `token`, both recalls over heads with a set, where no step is dense.
    `loss~4` and `right~4` leave out the steps that are dense under `rectify=4`, of whoever decodes.

    Attributes:
        arms: specs, as `Study.policies` reads them.
        prompt: tokens that are read densely first.
        decoded: tokens that follow.
        texts: how many.
        seed: where the first text begins.
        apart: phases of rectification whose dense steps some measures leave out.
    """

    interval: ClassVar[str] = TEXTS

    arms: tuple[str, ...]
    prompt: int = 1024
    decoded: int = 1024
    texts: int = 16
    seed: int = 20
    apart: tuple[int, ...] | None = None

    def units(self, study: Study) -> int:
        return len(study.policies(self.arms)) * self.texts

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        policies, subject = study.policies(self.arms), study.subject
        for policy in policies.values():
            policy.plan(subject.shape)
        length = self.prompt + self.decoded + 1
        texts = stretches(subject.tokenizer, length, self.texts, self.seed, subject.positions)
        about = {name: getattr(self, name) for name in ("prompt", "decoded", "texts", "seed")}
        with study.samples(about, KEY) as ledger:
            problems = [Problem(text, ()) for text in texts]
            decoding = Decoding(
                study.loaded, subject.tokenizer, problems, ledger, study.threads, prompt=self.prompt, apart=self.apart
            )
            decoding.run([*dict.fromkeys(map(str, policies.values()))], advance)
            return [
                Sample(str(number), arm, ledger.records[number, str(policy)]["values"])
                for arm, policy in policies.items()
                for number in range(len(texts))
            ]

    def conditions(self, study: Study) -> dict[str, Any]:
        return study.environment("sources of installed packages", self.seed)


@dataclass(frozen=True)
class Decoding(Sweep):
    """Texts that are not asked but decoded with their own tokens behind a `prompt` of so many; see `Continuation`."""

    prompt: int = 0
    apart: tuple[int, ...] | None = None

    def ask(self, number: int, specs: Sequence[str]) -> Iterator[dict[str, Any]]:
        model, tokens = self.model, self.problems[number].tokens
        reader, targets = Reader(model, tokens[: self.prompt]), torch.tensor(tokens[self.prompt + 1 :])
        for policy in map(Policy.from_spec, specs):
            recall = RecallObserver(shape_of(model.config).full_layers, keep_steps=True)
            observers = (recall,) if policy.rectify is None else ()
            with sparsify(model, policy, tokenizer=self.tokenizer, observers=observers) as run, run.decoding():
                pieces = [
                    reader.feed_rows([tokens[at : min(at + _TOGETHER, len(tokens) - 1)]], 0, policy.phase)[0]
                    for at in range(self.prompt, len(tokens) - 1, _TOGETHER)
                ]
            reader.crop()
            chances = torch.cat(pieces).float().log_softmax(-1).cpu()
            of_targets = chances.gather(-1, targets[:, None])[:, 0]
            found = {"loss": -of_targets, "right": (chances.argmax(-1) == targets).float()}
            if observers:
                records = recall.records()
                found |= {name: _means(getattr(records, name)) for name in ("attention", "token")}
            values = _values(found) | _apart(found, self.apart or ())
            yield {"problem": number, "spec": str(policy), "values": values}


def stretches(tokenizer: Any, length: int, count: int, seed: int, positions: int) -> list[tuple[int, ...]]:
    """Tokens of `count` texts of packages' sources, none of which overlap.

    What the tokenizer begins every text with takes the place of the first ones, so that no target moves.

    Raises:
        DocumentError: the model has fewer positions, or there are not as many texts.
    """
    if length > positions:
        raise DocumentError(f"texts of {length} tokens are not valid: the model has {positions} positions")
    corpus, room = Packages(tokenizer), int(length * _SPARE)
    starts = corpus.stretches(room, count, int(numpy.random.default_rng(seed).integers(room)))
    if len(starts) < count:
        raise DocumentError(f"{count} texts of {length} tokens: the packages hold {len(starts)}")
    beginning = TokenizedText.of(tokenizer, "").tokens
    texts = (encode(tokenizer, corpus.stretch(start, room))[:length] for start in starts[:count])
    return [(*beginning, *text[len(beginning) :]) for text in texts]


def _means(recall: Tensor) -> Tensor:
    """`[steps]`, over heads with a set."""
    return recall.flatten(1).nanmean(-1)


def _apart(found: dict[str, Tensor], phases: Sequence[int]) -> Values:
    """Of likelihoods, without the steps that end a phase: `every` sparse ones, then a dense one."""
    values = {}
    for every in phases:
        for name in ("loss", "right"):
            steps = found[name]
            values[f"{name}~{every}"] = round(float(steps[torch.arange(len(steps)) % (every + 1) != every].mean()), 6)
    return values


def _values(found: dict[str, Tensor]) -> Values:
    values = {}
    for name, steps in found.items():
        if not steps.isnan().any():
            values[name] = round(float(steps.mean()), 6)
            for part, own in enumerate(steps.tensor_split(PARTS), start=1):
                values[f"{name}@{part}"] = round(float(own.mean()), 6)
    return values
