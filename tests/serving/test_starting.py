"""While a lossless engine starts vLLM drafts for requests of its own, then captures graphs, which no thread may see."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from counting import used
from saccade.adapters.vllm import metrics
from saccade.adapters.vllm.worker import lossless
from saccade.decode.counters import Counters


def test_nothing_is_counted_and_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, said, seen, counters = list[Any](), Counter[str](), list[bool](), Counters(2, by_row=True)

    def timer(seconds: float, look: Any) -> Any:
        timers.append(look)
        return SimpleNamespace(start=lambda: None)

    def metric(name: str, *labels: str) -> Any:
        return SimpleNamespace(inc=lambda amount: said.update({name: amount}), set=lambda value: None)

    monkeypatch.setattr(metrics.threading, "Timer", timer)
    monkeypatch.setattr(metrics, "metric", metric)
    report = metrics.StepMetrics(counters, None, pause=1.0)

    def step(length: int, attended: int) -> None:
        report.step([length], [])
        counters.add([used(layer, [length], [[attended]]) for layer in range(2)])

    def warm_up(worker: Any) -> str:
        seen.append(report.starting)
        step(2000, 1000)
        report.again()
        report.verified("tidal", torch.ones(2, 3))
        assert not timers
        return "done"

    worker: Any = object.__new__(lossless.LosslessWorker)
    worker.vllm_config = None
    monkeypatch.setattr(lossless.Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(lossless, "serving_of", lambda _: SimpleNamespace(metrics=report))
    assert worker.compile_or_warm_up_model() == "done" and seen == [True]
    step(40, 20)
    assert timers and not report.starting
    report.flush()
    assert said == {"tokens_decoded": 1, "tokens_attended": 20, "tokens_skipped": 20}
