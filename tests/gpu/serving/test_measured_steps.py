"""What captured steps report: tokens, and the recall that is computed behind them, as eager steps report it."""

import time

import pytest
from cuda_engines import CudaEngines, Request, feed, say

from saccade.adapters.vllm import metrics

POLICY, BUDGET = "less_is_more:budget=256,reselect=7", 256
# The longest answer is dense: recall of a step is computed when the next one comes.
REQUESTS = [Request("long", 0, 1500, 30), Request("covered", 3000, 90, 20), Request("off", 5000, 700, 48, sparse=False)]
FIGURES = ("tokens_decoded", "tokens_attended", "tokens_skipped", "attention_recall_count", "attention_recall_sum")


def figures() -> dict[str, float]:
    """Of this process, by name; a counter's total is its own."""
    found = {}
    for name in ("tokens_decoded", "tokens_attended", "tokens_skipped", *metrics.RECALLS):
        (family,) = metrics.metric(name).collect()
        for sample in family.samples:
            found[sample.name.removeprefix("saccade_").removesuffix("_total")] = sample.value
    return found


def reported(before: dict[str, float], tokens: int) -> dict[str, float]:
    """What was reported since, once so many tokens were; that happens on a thread, a second after the last step."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        now = figures()
        since = {name: now[name] - before[name] for name in FIGURES}
        if since["tokens_decoded"] >= tokens:
            break
        time.sleep(0.2)
    return since


def test_captured_steps_report_what_eager_ones_do(engines: CudaEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "exported", lambda: True)
    lengths = [length for one in REQUESTS if one.sparse for length in one.lengths[1:]]
    found = {}
    for mode, settings in {"captured": {}, "eager": {"enforce_eager": True}}.items():
        config = {"saccade": {"policy": POLICY, "recall": 1.0}}
        engine = engines.make(POLICY, additional_config=config, **settings)
        time.sleep(2.5)  # V2's warm-up requests are reported by now
        before = figures()
        feed(engine, REQUESTS)
        found[mode] = reported(before, len(lengths))
        say(f"{mode}: {found[mode]}")
    for mode in found:
        assert found[mode]["tokens_decoded"] == len(lengths)
        assert found[mode]["tokens_attended"] + found[mode]["tokens_skipped"] == pytest.approx(sum(lengths))
        assert found[mode]["attention_recall_count"] == sum(length > BUDGET for length in lengths)
    one, other = found["captured"], found["eager"]
    assert one["tokens_attended"] == pytest.approx(other["tokens_attended"])
    # float16 rounds alike in both, but not in every kernel: a mass of weights moves by its epsilon.
    recalls = [mode["attention_recall_sum"] / mode["attention_recall_count"] for mode in (one, other)]
    assert 0 < recalls[0] < 1
    assert recalls[0] == pytest.approx(recalls[1], abs=2**-10)
