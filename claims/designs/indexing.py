"""What an index costs while a text is decoded step by step, or how steady the sets are that it gives."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy

from lab.packages import stretches
from lab.runner import Runner
from lab.steadiness import Steadiness
from saccade.adapters.hf.run import sparsify
from saccade.eval.workers import on_threads
from saccade.methods.policy import Policy
from saccade.recipes.machine import synchronize

from ..judging.claim import Sample, Values
from ..judging.study import Study
from .continuation import PARTS
from .texts import OfTexts

KEY = ("text", "arm")


@dataclass(frozen=True, slots=True)
class Indexing(OfTexts):
    """Stretches of packages' sources that share no token; what follows the prompt is decoded with its own tokens.

    Measures without a window: `build`, the index's part of a prefill with its build, and `update`, its later part of
    decoding's time. With one: `hit` and `jaccard` (LycheeCluster, appendix D), those of random sets
    of the same sizes, and `jaccard_above_random`; also by quarter, as `hit@4`.

    Attributes:
        arms: specs, as `Study.policies` reads them.
        prompt, decoded: tokens that are read densely first, and that follow.
        window: steps that the window hit rate looks back; None: steps are timed.
        texts, seed: how many; where the first one begins.
    """

    arms: tuple[str, ...]
    prompt: int
    decoded: int
    texts: int = 12
    window: int | None = None
    seed: int = 20

    def units(self, study: Study) -> int:
        return len(study.policies(self.arms)) * self.texts

    def run(self, study: Study, advance: Callable[[str], None]) -> Sequence[Sample]:
        policies, subject = study.policies(self.arms), study.subject
        texts = stretches(subject.tokenizer, self.prompt + self.decoded, self.texts, self.seed, subject.positions)
        about = {name: getattr(self, name) for name in ("prompt", "decoded", "texts", "window", "seed")}
        with study.samples(about, KEY) as ledger, on_threads(study.threads):
            for number, tokens in enumerate(texts):
                for arm, policy in policies.items():
                    if (number, arm) not in ledger.records:
                        values = self._read(study.loaded, subject.tokenizer, tokens, policy)
                        ledger.add({"text": number, "arm": arm, "values": values})
                        advance(arm)
            records = [ledger.records[number, arm] for number in range(self.texts) for arm in policies]
        return [Sample(str(record["text"]), record["arm"], record["values"]) for record in records]

    def _read(self, model: Any, tokenizer: Any, tokens: Sequence[int], policy: Policy) -> Values:
        watched = Steadiness(self.window or 1, random=True)
        observers = () if self.window is None else (watched,)
        with sparsify(model, policy, tokenizer=tokenizer, observers=observers) as run:
            runner = Runner(model, run, tokens, self.prompt)
            watched.cache = runner.cache
            synchronize(model.device)
            start = time.perf_counter()
            runner.prefill()
            synchronize(model.device)
            prefill = time.perf_counter() - start
            if self.window is None:
                update, build = float(runner.block(self.decoded)["index_time_share"]), run.stats().build_seconds
                return {"build": build / (prefill + build), "update": update}
            with run.decoding():
                runner.feed(self.decoded)
        return {name: value for one, steps in watched.series().items() for name, value in _parts(one, steps)}


def _parts(name: str, steps: Sequence[float]) -> list[tuple[str, float]]:
    """The mean of all steps, and of each quarter."""
    quarters = enumerate(numpy.array_split(steps, PARTS), start=1)
    return [(name, fmean(steps)), *((f"{name}@{part}", float(own.mean())) for part, own in quarters)]
