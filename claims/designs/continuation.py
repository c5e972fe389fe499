"""Plain text decoded with its own tokens behind a dense prompt: their likelihood and both recalls, with position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.kinds import texts_by_kind
from lab.packages import stretches
from saccade.adapters.hf.run import sparsify
from saccade.calibrate.sweep import KEY, Sweep
from saccade.checkpoints.shape import shape_of
from saccade.decode.recall import RecallObserver
from saccade.eval.reader import Reader
from saccade.eval.tokens import TokenizedText
from saccade.methods.policy import Policy

from ..judging.claim import Sample, Values
from ..judging.study import Study
from .texts import OfTexts
from .together import rows_together

PARTS = 4
"""Equal parts of what is decoded; `MEASURE@1` is the first one's, `MEASURE@4` the last one's."""
_TOGETHER = 64  # tokens of a call, each of which chooses for itself


@dataclass(frozen=True, slots=True)
class Continuation(OfTexts):
    """Stretches of packages' sources that share no token; what follows the prompt is fed token by token.

    Measures, of all that is decoded and of its parts: `loss`, mean negative log-likelihood of the next token; `right`,
    how often it is the likeliest; `attention` and `token`, both recalls over heads with a set, where no step is dense.
    `loss~4` and `right~4` leave out the steps that are dense under `rectify=4`, of whoever decodes.

    Attributes:
        arms: specs, as `Study.policies` reads them.
        prompt, decoded: tokens that are read densely first, and that follow.
        texts, seed: how many, of each kind; where the first one begins.
        apart: phases of rectification whose dense steps some measures leave out.
        kinds: of texts, as `texts_by_kind` makes them; a text is `KIND NUMBER` then.
        nearer: shorter prompts in front of the same tokens too; an arm is `behind PROMPT, SPEC` then.
        own: temperature at which the model itself writes, densely, what follows the prompt; the text's own goes.
    """

    arms: tuple[str, ...]
    prompt: int = 1024
    decoded: int = 1024
    texts: int = 16
    seed: int = 20
    apart: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    nearer: tuple[int, ...] | None = None
    own: float | None = None

    def units(self, study: Study) -> int:
        batches = sum(-(-self._count // self._rows(study, prompt)) for prompt in self._prompts)
        return len(study.policies(self.arms)) * batches

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        policies, subject = study.policies(self.arms), study.subject
        batches = [*self._batches(study)]
        about = {name: getattr(self, name) for name in ("prompt", "decoded", "texts", "seed")}
        about |= {name: list(told) for name in ("kinds", "nearer") if (told := getattr(self, name))}
        about |= {} if self.own is None else {"own": self.own}
        with study.samples(about | {"batches": [len(batch.names) for batch in batches]}, KEY) as ledger:
            decoding = Decoding(study.loaded, subject.tokenizer, batches, ledger, study.threads, apart=self.apart)
            decoding.run([*dict.fromkeys(map(str, policies.values()))], advance)
            return [
                Sample(name, f"{batch.front}{arm}", values)
                for arm, policy in policies.items()
                for number, batch in enumerate(batches)
                for name, values in zip(batch.names, ledger.records[number, str(policy)]["values"], strict=True)
            ]

    def conditions(self, study: Study) -> dict[str, Any]:
        return study.environment(
            "sources of installed packages" if self.kinds is None else f"installed packages: {', '.join(self.kinds)}",
            self.seed,
        )

    @property
    def _prompts(self) -> tuple[int, ...]:
        return (self.prompt, *(self.nearer or ()))

    @property
    def _count(self) -> int:
        return self.texts * len(self.kinds or ("",))

    def _rows(self, study: Study, prompt: int) -> int:
        return rows_together(study.subject.device, self._count, prompt + self.decoded)

    def _batches(self, study: Study) -> Iterator[Batch]:
        subject, length = study.subject, self.prompt + self.decoded + 1
        asked = (subject.tokenizer, length, self.texts, self.seed, subject.positions)
        if self.kinds is None:
            named = {str(number): tuple(text) for number, text in enumerate(stretches(*asked))}
        else:
            made = texts_by_kind(*asked, chats="chat" in self.kinds)
            named = {f"{kind} {number}": tuple(text) for kind in self.kinds for number, text in enumerate(made[kind])}
        beginning = TokenizedText.of(subject.tokenizer, "").tokens
        for prompt in self._prompts:
            rows, dropped = self._rows(study, prompt), self.prompt - prompt + len(beginning)
            cut = {name: (*beginning, *text[dropped:]) for name, text in named.items()}
            for first in range(0, len(cut), rows):
                names = tuple(cut)[first : first + rows]
                front = f"behind {prompt}, " if self.nearer else ""
                read = tuple(map(cut.__getitem__, names))
                if self.own is not None:
                    given = [text[:prompt] for text in read]
                    read = written(study.loaded, given, self.decoded + 1, self.own, self.seed)
                yield Batch(front, prompt, names, read)


def written(
    model: Any, prompts: Sequence[Sequence[int]], count: int, temperature: float, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Prompts of one length and `count` tokens that the model writes behind each, drawn at a temperature.

    What would end a text is not written, so that all are equally long.
    """
    ids = torch.tensor(prompts, device=model.device)
    torch.manual_seed(seed)
    # Named, since a checkpoint may come with others of its own.
    plain = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    told = {"do_sample": True, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **plain, **told)
    return tuple(map(tuple, found.tolist()))


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts that are read together, behind prompts of so many tokens.

    Attributes:
        front: what names of arms begin with.
    """

    front: str
    prompt: int
    names: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Decoding(Sweep):
    """Batches that are not asked but decoded with their own tokens behind their prompts; see `Continuation`."""

    problems: Sequence[Batch]  # type: ignore[assignment]  # of other problems
    apart: tuple[int, ...] | None = None

    def ask(self, number: int, specs: Sequence[str]) -> Iterator[dict[str, Any]]:
        model, batch = self.model, self.problems[number]
        reader = Reader(model, *(text[: batch.prompt] for text in batch.texts))
        fed = torch.tensor([text[batch.prompt :] for text in batch.texts])
        for policy in map(Policy.from_spec, specs):
            recall = RecallObserver(shape_of(model.config).full_layers, keep_steps=True)
            observers = (recall,) if policy.rectify is None else ()
            loss, right = [], []
            with sparsify(model, policy, tokenizer=self.tokenizer, observers=observers) as run, run.decoding():
                for at in range(0, fed.shape[1] - 1, _TOGETHER):
                    targets = fed[:, at + 1 : at + _TOGETHER + 1]
                    logits = reader.feed_rows(fed[:, at : at + targets.shape[1]].tolist(), 0, policy.phase)
                    chances = logits.float().log_softmax(-1).cpu()
                    loss.append(-chances.gather(-1, targets[..., None])[..., 0])
                    right.append((chances.argmax(-1) == targets).float())
            reader.crop()
            found = {"loss": torch.cat(loss, 1), "right": torch.cat(right, 1)}
            if observers:
                # Row by row within a step.
                records = recall.records()
                found |= {name: _means(getattr(records, name)).view(-1, len(fed)).T for name in ("attention", "token")}
            rows = [{name: steps[row] for name, steps in found.items()} for row in range(len(fed))]
            values = [_values(row) | _apart(row, self.apart or ()) for row in rows]
            yield {"problem": number, "spec": str(policy), "values": values}


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
