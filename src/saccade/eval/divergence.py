"""How far policies are from dense attention on the tokens that need a long context, over many texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
from scipy.stats import bootstrap

from ..adapters.hf.probe import KINDS, Attach, Passage, Probe, Told
from ..adapters.hf.run import attached
from ..checkpoints.shape import shape_of
from ..methods.policy import Policy

RESAMPLES = 2000


def probed(model: Any, tokenizer: Any, passage: Passage, policies: Sequence[Policy]) -> Iterator[dict[str, Any]]:
    """A `record` of a text for each policy, whose rectification is left out: steps from a dense cache, key tokens."""
    with attached_once(model) as attach:
        probe = Probe(model, [passage], attach=attach, keys_alone=True, walks=(1,))
        for policy in policies:
            (told,) = probe.measure(policy, tokenizer)
            yield record(told)


@contextmanager
def attached_once(model: Any) -> Iterator[Attach | None]:
    """What a probe attaches policies with: none, where the model stays attached, which takes as long as a step."""
    shape = shape_of(model.config)
    if shape.kinds or shape.sources:
        yield attached
    else:
        with attached(model, Policy.from_spec("dense"), None):
            yield None


def record(told: Mapping[Any, Told]) -> dict[str, Any]:
    """What is kept of one text: sums over all tokens told and over key tokens, by kind."""
    kept = dict[str, Any]()
    for kind, one in told.items():
        values = {"kl": one.divergence, "nll": one.likelihood, "equal": one.equal.double()}
        kept[kind] = {"tokens": len(one.key), "keys": int(one.key.sum())}
        kept[kind] |= {name: round(float(value.sum()), 6) for name, value in values.items()}
        kept[kind] |= {f"key_{name}": round(float(value[one.key].sum()), 6) for name, value in values.items()}
    return kept


@dataclass(frozen=True, slots=True)
class Divergence:
    """One policy on all texts, a `record` of each."""

    spec: str
    texts: Sequence[Mapping[str, Any]]

    def mean(self, what: str, *, key: bool) -> dict[str, float | None]:
        """Per token, by kind: `kl`, `nll` or `equal`; None without a token."""
        found = dict[str, float | None]()
        for kind in KINDS:
            count = sum(text[kind]["keys" if key else "tokens"] for text in self.texts)
            total = sum(text[kind][f"key_{what}" if key else what] for text in self.texts)
            found[kind] = total / count if count else None
        return found

    @property
    def keys(self) -> int:
        return sum(text[kind]["keys"] for text in self.texts for kind in KINDS)

    @property
    def kept(self) -> float:
        """Share of key tokens whose likeliest token is dense attention's, of the kind that keeps fewest."""
        return min((share for share in self.mean("equal", key=True).values() if share is not None), default=0.0)

    @property
    def sums(self) -> numpy.ndarray[Any, numpy.dtype[numpy.float64]]:
        """Of key tokens, `[texts, 4]`: divergence and number of natural text, then of repeated."""
        return numpy.array([[text[kind][what] for kind in KINDS for what in ("key_kl", "keys")] for text in self.texts])

    @property
    def merit(self) -> float:
        """The deciding measure: KL(dense ‖ policy) of a key token, natural plus repeated text, nats; less is better."""
        return float(_merit(self.sums.T))

    def interval(self, against: Divergence | None = None) -> tuple[float, float] | None:
        """95% of `merit`, or of how much lower it is than another's, by resampling texts; None of fewer than 3."""
        own = self.sums.T
        other = None if against is None else against.sums.T

        def statistic(*drawn: Any, axis: int = -1) -> Any:
            value = _merit(numpy.stack(drawn[:4]))
            return value if other is None else _merit(numpy.stack(drawn[4:])) - value

        if len(self.texts) < 3:
            return None
        data = (*own, *(() if other is None else other))
        drawn = {"paired": True, "vectorized": True, "n_resamples": RESAMPLES, "method": "percentile", "rng": 0}
        low, high = (float(end) for end in bootstrap(data, statistic, **drawn).confidence_interval)
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """A row of a results file."""
        whats = ("kl", "nll", "equal")
        measures = {what: self.mean(what, key=False) for what in whats}
        measures |= {f"key_{what}": self.mean(what, key=True) for what in whats}
        return {"spec": self.spec, "merit": self.merit, "interval": self.interval(), "keys": self.keys, **measures}


def _merit(columns: Any) -> Any:
    """Of columns `[4, …, texts]`, as `Divergence.sums` has them; a kind without key tokens adds nothing."""
    totals = columns.sum(-1)
    return totals[0] / numpy.maximum(totals[1], 1) + totals[2] / numpy.maximum(totals[3], 1)
