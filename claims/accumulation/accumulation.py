"""Error accumulation: what sparse decoding loses with the keys and values it has written itself (ReSA, section 3.2)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from statistics import fmean
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import DynamicCache

from saccade.adapters.hf.run import Run, sparsify
from saccade.errors import PolicyError
from saccade.eval.interval import wilson
from saccade.methods.policy import Policy
from saccade.plans.rectify import Phase

from .passages import Passage

TARGETS = 32
"""Last tokens of a passage, whose predictions are judged."""
BEST = 3
"""A prediction is right if the next token is among so many likeliest ones."""

ALL = "all"
"""Stands for all sources together."""
DENSE, DECODE_ONLY, SPARSE_ONLY = "dense", "decode-only", "sparse-only"

_CHUNK = 256  # tokens of a call that decodes a passage from its first token on
_RESAMPLES = 10_000
_FEWEST = 6
"""Passages of which an interval is given: were all differences of fewer of one sign, chance would do that too."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to come to the last predictions of a passage.

    Attributes:
        length: tokens that are read.
        template: the policy as asked for; None is dense attention.
        kept: share of the passage that a sparse head attends to.
        setting: which keys and values sparse steps have written before a prediction. "dense" and "decode-only": none;
            "every N": at most the last N, rectification has rewritten the others; "sparse-only": all.
        policy: what runs.
    """

    length: int
    template: Policy | None
    kept: float | None
    setting: str
    policy: Policy | None

    @property
    def phase(self) -> Phase:
        """When dense passes come."""
        return Phase(None) if self.policy is None else self.policy.phase

    @property
    def suffix(self) -> int:
        """Tokens behind the dense prompt: so many that the targets are the last ones before a dense pass is due."""
        return max(self.phase.period - 1, TARGETS)


def cases_of(
    template: Policy, kept: Sequence[float], every: Sequence[int], length: int, *, sparse_only: bool
) -> Iterator[Case]:
    """The cases of one policy at one length, in an order in which each leaves intact what the next one reads.

    Raises:
        PolicyError: a policy to which a kept share or rectification means nothing, or a share too small for it.
    """
    for share in kept:
        plain = _bound(template, share, length, None)
        yield Case(length, template, share, DECODE_ONLY, plain)
        for steps in sorted(every):
            yield Case(length, template, share, f"every {steps}", _bound(template, share, length, steps))
        if sparse_only:
            yield Case(length, template, share, SPARSE_ONLY, plain)


def _bound(template: Policy, kept: float, length: int, every: int | None) -> Policy:
    """The policy that keeps a share of a passage: its budget, or its own ratio where it has one."""
    fields = type(template.options).model_fields
    name = "budget" if template.options.budgeted else "ratio"
    if name not in fields or "rectify" not in fields:
        raise PolicyError(f"policy {template}: neither a kept share nor rectification means anything to it")
    if name == "budget" and name in template.options.model_fields_set:
        raise PolicyError(f"policy {template}: its budget is the kept share of the passage; leave it out")
    # In decimals: 0.1 of 30 is 3.
    value = ceil(Fraction(str(kept)) * length) if name == "budget" else kept
    return Policy.create(
        template.name, {**template.options.model_dump(exclude_unset=True), name: value, "rectify": every}
    )


@dataclass
class Accumulation:
    """The experiment; `run` it, then read `rows`, which are also right in the middle of it.

    Attributes:
        model, tokenizer: loaded, in eval mode.
        passages: what is read.
        cases: what is measured, dense excepted, which always is.
        sparse_only: passages per source that are decoded from their first token on; this takes long.
        batch: passages that are read together.
    """

    model: Any
    tokenizer: Any
    passages: Sequence[Passage]
    cases: Sequence[Case]
    sparse_only: int
    batch: int
    _right: dict[Case, dict[Passage, int]] = field(init=False, default_factory=lambda: defaultdict(dict))
    _attended: dict[Case, list[float]] = field(init=False, default_factory=lambda: defaultdict(list))
    _divergence: dict[Case, dict[Passage, float]] = field(init=False, default_factory=lambda: defaultdict(dict))
    _dense: Tensor = field(init=False)  # log-probabilities of the batch at hand

    @property
    def units(self) -> int:
        """Units of work of a whole run: a dense reading or a case of a batch each."""
        return sum(len(cases) + (cases[0].setting != SPARSE_ONLY) for _, cases in self._work())

    def run(self, advance: Callable[[str], None]) -> None:
        """Read all passages; the long readings, from the first token on, come last.

        Args:
            advance: called after every unit of work with its name.
        """
        for batch, cases in self._work():
            length = cases[0].length
            tokens = torch.tensor([passage.cut(length + 1) for passage in batch], device=self.model.device)
            if cases[0].setting == SPARSE_ONLY:
                for case in cases:
                    self._record(case, batch, self._from_the_start(case, tokens), tokens)
                    advance(f"{length}, {case.policy}, {case.setting}")
            else:
                self._from_dense(cases, batch, tokens, advance)

    def rows(self) -> list[dict[str, Any]]:
        """One row per source and case that has been measured; see `docs/accumulation.md`."""
        sources = list(dict.fromkeys(passage.source for passage in self.passages))
        if len(sources) > 1:
            sources.append(ALL)
        return [self._row(source, case) for source in sources for case in self._right if self._held(source, case)]

    def by_passage(self) -> Iterator[tuple[Case, Passage, dict[str, float]]]:
        """What each case has measured on each passage, dense first.

        `right` is the share of right predictions, `divergence` KL(dense || case) in nats a prediction; dense itself has
        none, and sparse-only, which is read apart from it.
        """
        for case, found in self._right.items():
            for passage, right in found.items():
                values, divergence = {"right": right / TARGETS}, self._divergence[case].get(passage)
                yield case, passage, values if divergence is None else values | {"divergence": divergence}

    def _work(self) -> Iterator[tuple[Sequence[Passage], Sequence[Case]]]:
        """Batches of passages and the cases of one length that they are read under."""
        for from_the_start in (False, True):
            passages = [p for p in self.passages if not from_the_start or p.number < self.sparse_only]
            for length in dict.fromkeys(case.length for case in self.cases):
                cases = [
                    case
                    for case in self.cases
                    if case.length == length and (case.setting == SPARSE_ONLY) == from_the_start
                ]
                for start in range(0, len(passages) if cases else 0, self.batch):
                    yield passages[start : start + self.batch], cases

    @torch.no_grad()
    def _from_dense(
        self, cases: Sequence[Case], batch: Sequence[Passage], tokens: Tensor, advance: Callable[[str], None]
    ) -> None:
        """Read the passages densely once; then take the last tokens back and decode them, case by case."""
        cache = DynamicCache()
        output = self.model(tokens[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=TARGETS)
        self._record(Case(cases[0].length, None, None, DENSE, None), batch, output.logits, tokens)
        advance(f"{cases[0].length}, {DENSE}")
        window = max(case.suffix for case in cases)
        previous = None
        for case in cases:
            if previous not in (None, (case.template, case.kept)):
                _crop(cache, window)
                self.model(tokens[:, -window - 1 : -1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            previous = (case.template, case.kept)
            decode = self._one_by_one if case.setting == DECODE_ONLY else self._suffix
            self._record(case, batch, decode(case, tokens, cache), tokens)
            advance(f"{case.length}, {case.policy}, {case.setting}")

    def _one_by_one(self, case: Case, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """Decode every target's predecessor behind dense keys and values only: the last one first."""
        logits = []
        with self._attached(case) as run, run.decoding():
            for _ in range(TARGETS):
                _crop(cache, 1)
                behind = int(cache.get_seq_length())
                step = tokens[:, behind : behind + 1]
                logits.append(self.model(step, past_key_values=cache, use_cache=True).logits)
                _crop(cache, 1)
            self._count(case, run)
        missing = tokens[:, -TARGETS - 1 : -1]
        # Nothing reads what lies there; only its length matters to the next case.
        self.model(missing, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return torch.cat(logits[::-1], dim=1)

    def _suffix(self, case: Case, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """Take back the suffix and decode it as `rectify` does: `every` sparse steps, a dense pass, and so on."""
        _crop(cache, case.suffix)
        return self._feed(case, tokens[:, -case.suffix - 1 : -1], cache, case.phase.pieces(0, case.suffix))

    @torch.no_grad()
    def _from_the_start(self, case: Case, tokens: Tensor) -> Tensor:
        """Decode the passages from their first token on, without a prompt."""
        count = tokens.shape[1] - 1
        return self._feed(case, tokens[:, :-1], DynamicCache(), [_CHUNK] * ceil(count / _CHUNK))

    def _feed(self, case: Case, tokens: Tensor, cache: DynamicCache, pieces: Iterable[int]) -> Tensor:
        """Decode tokens `[B, n]` piece by piece; logits `[B, TARGETS, V]` behind the last ones.

        Every token of a piece chooses its own set as if it came alone. A dense pass takes place at the beginning of a
        call, and all its tokens are then dense, hence the pieces.
        """
        logits: list[Tensor] = []
        with self._attached(case) as run, run.decoding():
            done = 0
            for size in pieces:
                piece = tokens[:, done : done + size]
                done += piece.shape[1]
                if piece.shape[1]:
                    keep = min(max(done - tokens.shape[1] + TARGETS, 1), piece.shape[1])
                    output = self.model(piece, past_key_values=cache, use_cache=True, logits_to_keep=keep)
                    logits.append(output.logits)
            self._count(case, run)
        return torch.cat(logits, dim=1)[:, -TARGETS:]

    def _attached(self, case: Case) -> Run:
        assert case.policy is not None, "dense attention is read as a prompt"
        return sparsify(self.model, case.policy, tokenizer=self.tokenizer)

    def _count(self, case: Case, run: Run) -> None:
        share = run.stats().share_attended
        if share is not None:
            self._attended[case].append(share)

    def _record(self, case: Case, batch: Sequence[Passage], logits: Tensor, tokens: Tensor) -> None:
        """Count right predictions, where fewer than `BEST` tokens have a larger logit; how far all are from dense."""
        targets = tokens[:, -TARGETS:, None]
        above = (logits > logits.gather(-1, targets)).sum(-1)
        for passage, right in zip(batch, (above < BEST).sum(-1).tolist(), strict=True):
            self._right[case][passage] = right
        chances = logits.float().log_softmax(-1)
        if case.setting == DENSE:
            self._dense = chances
        elif case.setting != SPARSE_ONLY:
            found = kl_div(chances, self._dense, reduction="none", log_target=True).sum(-1).mean(-1)
            self._divergence[case] |= dict(zip(batch, found.tolist(), strict=True))

    def _held(self, source: str, case: Case) -> list[Passage]:
        return [passage for passage in self._right[case] if source in (passage.source, ALL)]

    def _row(self, source: str, case: Case) -> dict[str, Any]:
        passages = self._held(source, case)
        own, dense = self._right[case], self._right.get(Case(case.length, None, None, DENSE, None), {})
        right, count = sum(own[passage] for passage in passages), TARGETS * len(passages)
        differences = [(own[passage] - dense[passage]) / TARGETS for passage in passages if passage in dense]
        shares = self._attended[case]
        return {
            "source": source,
            "length": case.length,
            "policy": DENSE if case.template is None else str(case.template),
            "kept": case.kept,
            "setting": case.setting,
            "spec": DENSE if case.policy is None else str(case.policy),
            "share_attended": fmean(shares) if shares else 1.0,
            "passages": len(passages),
            "right": right,
            "n": count,
            "accuracy": right / count,
            "interval": wilson(right, count),
            "difference": fmean(differences) if differences else None,
            "difference_interval": resampled_mean(differences) if len(differences) >= _FEWEST else None,
            "right_by_passage": [own[passage] for passage in passages],
        }


def resampled_mean(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% interval of a mean by resampling whole passages (percentile bootstrap)."""
    held = numpy.asarray(values, dtype=numpy.float64)
    drawn = numpy.random.default_rng(seed).integers(len(held), size=(_RESAMPLES, len(held)))
    low, high = numpy.percentile(held[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def _crop(cache: DynamicCache, tokens: int) -> None:
    """Take the last tokens out of the cache; transformers wants their number negative."""
    cache.crop(-tokens)
