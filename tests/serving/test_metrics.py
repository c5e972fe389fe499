"""What is exported: the figures of steps against what was asked, every request once, and only where it is set up."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Engines, answers, force_own_path, greedy, prompts
from transformers import AutoModelForCausalLM, GenerationConfig
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from counting import used
from saccade import sparsify
from saccade.adapters.vllm import metrics
from saccade.adapters.vllm.metrics import VARIABLE, StepMetrics, exporting, leftovers
from saccade.adapters.vllm.worker.requests import SERVING, RequestRow, RequestRows
from saccade.checkpoints.bundled import model_path
from saccade.decode.counters import Counters
from saccade.decode.recall import MeanRecall
from saccade.errors import ServingError
from walking import among

LENGTHS = (300, 90, 151, 33)
ANSWERS = (20, 12, 1, 7)

Read = Callable[..., float]
Timers = list[tuple[float, Callable[[], None]]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Figures since the start of the test, those of requests since ever; in this process, which has no folder."""
    monkeypatch.setattr(metrics, "exported", lambda: True)

    def now(name: str, *labels: str, sample: str = "") -> float:
        (family,) = metrics.metric(name, *labels).collect()
        return next(one.value for one in family.samples if one.name.endswith(sample or ("_total", name)))

    before = {
        (name, sample): now(name, sample=sample)
        for name, (kind, _, labelled) in metrics.KINDS.items()
        for sample in (("_count", "_sum") if kind == "Summary" else ("",))
        if not labelled and kind != "Gauge"
    }
    return lambda name, *labels, sample="": now(name, *labels, sample=sample) - before.get((name, sample), 0)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """What would be done after so many seconds; nothing is until a test does it."""
    started: Timers = []

    def timer(seconds: float, look: Callable[[], None]) -> Any:
        return SimpleNamespace(start=lambda: started.append((seconds, look)))

    monkeypatch.setattr(metrics.threading, "Timer", timer)
    return started


HEADED = "tidal:budget=64,reselect=7,heads=query"
COUNTED = ("dense", "quest:budget=64", "less_is_more:budget=64,reselect=7", "lychee_cluster:budget=96")
COUNTED += "resa:min_pages=2,rectify=4", HEADED


def counting(engines: Engines, policy: str) -> LLM:
    return engines.visit(policy, recall=1.0, max_num_batched_tokens=128)


@pytest.mark.parametrize("own_path", [False, True])
@pytest.mark.parametrize("policy", among(COUNTED, (COUNTED[0], *COUNTED[3:])))
def test_every_decoded_token_is_counted(
    policy: str, own_path: bool, all_engines: Engines, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mixed batch whose prompts come in chunks; whoever opts out is counted as a request alone."""
    engine = counting(all_engines, policy)
    if own_path:
        force_own_path(monkeypatch)
    params = [*(greedy(count) for count in ANSWERS), greedy(9, extra_args={"saccade": "off"})]
    before = read("requests", policy), read("requests", "off")
    answers(engine, prompts(*LENGTHS, 70), params)
    assert (read("requests", policy) - before[0], read("requests", "off") - before[1]) == (len(LENGTHS), 1)
    # The length of the row at every token that is decoded behind the first.
    cached = [length + step for length, count in zip(LENGTHS, ANSWERS, strict=True) for step in range(1, count)]
    attended, skipped = read("tokens_attended"), read("tokens_skipped")
    assert read("tokens_decoded") == len(cached)
    assert attended + skipped == pytest.approx(sum(cached))
    assert skipped == 0 if policy == "dense" else 0 < skipped < sum(cached)
    measured = read("attention_recall", sample="_count")
    assert measured == 0 if policy == "dense" else 0 < measured <= len(cached)
    assert 0 <= read("attention_recall", sample="_sum") <= measured + 1e-6
    passes = sum((count - 1) // 5 for count in ANSWERS) if policy.startswith("resa") else 0
    assert (read("rectifications"), read("rectified_tokens")) == (passes, 4 * passes)


@pytest.mark.parametrize("policy", among((HEADED, "quest:budget=64"), (HEADED,)))
def test_figures_are_those_of_the_transformers_adapter(policy: str, all_engines: Engines, read: Read) -> None:
    (ids,) = prompts(200)
    answers(counting(all_engines, policy), [ids], greedy(9))
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    settings = GenerationConfig(do_sample=False, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
    with sparsify(model, policy) as run, torch.no_grad():
        prompt = torch.tensor([ids])
        model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        layers = run.stats().layers
    assert read("tokens_attended") == pytest.approx(sum(layer.tokens * layer.steps for layer in layers) / len(layers))


def recalled(*layers: MeanRecall | None) -> Any:
    """What was measured in each layer; one that nobody has seen is dense."""
    return SimpleNamespace(layers=(found := [*layers]), per_layer=lambda: found)


HALF = MeanRecall(0.25, 0.5, 1.0), None, MeanRecall(0.75, 0.5, 1.0), MeanRecall(None, None, 0.0)
"""On average 0.5."""


@pytest.mark.parametrize("pause", [0.0, 1000.0])
def test_warm_ups_are_nobodys(pause: float, read: Read) -> None:
    counters = Counters(4, by_row=True)
    report = StepMetrics(counters, recalled(*HALF), pause)

    def attend(tokens: int, rows: int = 1) -> None:
        for layer in range(4):
            counters.add([used(layer, [2000] * rows, [[tokens]] * rows)])
            report.layer_done(layer)

    report.disregard()
    attend(1000)
    report.step([40, 60], [10])
    report.measured(2)
    attend(20, rows=2)
    for _ in range(2):
        report.disregard()
        attend(1000)
    report.step([50], [])
    attend(30)
    if pause:
        report.flush()
    assert read("tokens_decoded") == 4
    assert read("tokens_attended") == pytest.approx(20 + 20 + 10 + 30)
    assert read("tokens_skipped") == pytest.approx(100 - 40 + 50 - 30)
    for name, total in (("attention_recall", 1.0), ("attention_recall_with_dense", 2 * (0.5 + 1 + 0.5 + 1) / 4)):
        assert (read(name, sample="_count"), read(name, sample="_sum")) == (2, pytest.approx(total))
    assert metrics.metric("share_attended").collect()[0].samples[0].value == pytest.approx(80 / 160)


def test_a_step_that_is_replayed_has_longer_rows(read: Read) -> None:
    report = StepMetrics(Counters(2, by_row=True), None, 1000.0)
    report.step([40, 60], [10])
    for _ in range(2):
        report.again()
    report.flush()
    assert [read(f"tokens_{what}") for what in ("decoded", "attended", "skipped")] == [9, 10 + 11 + 12, 306]


def test_a_look_in_the_middle_of_a_step_does_not_count_what_it_measures(read: Read) -> None:
    recall = recalled(None, None)
    report = StepMetrics(Counters(2, by_row=True), recall, 1000.0)
    for _ in range(2):
        report.step([40], [])
        report.measuring(1)
        report.flush()
        for layer in range(2):
            recall.layers[layer] = MeanRecall(0.75, 0.5, 1.0)
            report.layer_done(layer)
    report.step([41], [])
    report.flush()
    assert [read("attention_recall", sample=sample) for sample in ("_count", "_sum")] == [2, pytest.approx(1.5)]


def test_an_accelerator_is_read_once_in_a_while(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    counters, looked, now = Counters(2, by_row=True), list[float](), [100.0]
    monkeypatch.setattr(counters, "totals", lambda: looked.append(now[0]) or [(0.0, 0.0, 0.0, 0.0)] * 2)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    report = StepMetrics(counters, None, pause=1.0)
    for _ in range(50):
        report.step([10], [])
        now[0] += 0.1
    assert len(looked) == 4
    report.flush()
    assert read("tokens_decoded") == 50


@pytest.fixture
def rows() -> RequestRows:
    made = RequestRows(SimpleNamespace(additional_config={}, compilation_config=SimpleNamespace(**{SERVING: None})))
    made._follows = True
    return made


def update(added: Sequence[Any] = (), removed: Sequence[int] = (), moved: Sequence[Any] = ()) -> BatchUpdate:
    return BatchUpdate(batch_size=8, added=list(added), removed=list(removed), moved=list(moved))


def test_a_request_that_comes_back_is_not_another_one(rows: RequestRows) -> None:
    came, emptied, params, prompt = list[RequestRow](), list[bool](), SamplingParams(), [1, 2, 3]
    rows.arrived, rows.emptied = came.append, lambda: emptied.append(True)
    first, second, third = list[int](), list[int](), list[int]()
    rows.update_state(update([(0, params, prompt, first), (1, params, prompt, second)]))
    rows.update_state(update(moved=[(1, 0, MoveDirectionality.SWAP)]))
    assert len(came) == 2
    # Out before its first token, and back when the other has had one and gives it its place.
    rows.update_state(update(removed=[0]))
    first.append(7)
    rows.update_state(update([(0, params, prompt, second), (1, params, prompt, third)]))
    rows.update_state(update([(2, params, prompt, first)]))
    assert len(came) == 3 and not emptied
    assert [rows.rows[index].output for index in range(3)] == [second, third, first]
    rows.update_state(update(removed=[0, 1, 2]))
    assert emptied and not rows.rows


def test_only_requests_that_vllm_still_holds_are_remembered(rows: RequestRows) -> None:
    for _ in range(30):
        rows.update_state(update([(0, SamplingParams(), [1], [5])]))
        rows.update_state(update(removed=[0]))
    assert not rows._away
    prompt, waiting = [1], list[int]()
    rows.update_state(update([(0, SamplingParams(), prompt, waiting)]))
    first = rows.rows[0]
    rows.update_state(update(removed=[0]))
    rows.update_state(update([(3, SamplingParams(), prompt, waiting)]))
    assert rows.rows[3] is first and first.resumed
    # A streaming session goes on with another prompt and the same list.
    rows.update_state(update([(3, SamplingParams(), [1, 2], waiting)]))
    assert rows.rows[3] is not first and rows.rows[3].resumed


def test_slots_of_model_runner_v2_are_filled_anew(rows: RequestRows) -> None:
    came = list[RequestRow]()
    rows.arrived = came.append
    rows._slots = SimpleNamespace(prompt_len=SimpleNamespace(np=[5, 5]), prefill_len=SimpleNamespace(np=[5, 9]))
    assert rows.add_request(0, SamplingParams()) is False
    rows.add_request(1, SamplingParams())  # with four tokens of its answer
    assert [row is rows.rows[0] for row in came] == [True]
    assert rows.rows[1].decodes(9, True) and not rows.rows[0].decodes(9, True)
    other = RequestRows(SimpleNamespace(additional_config={}))
    other.update_state(update([(0, SamplingParams(), [1], [])]))
    other.add_request(0, SamplingParams())
    assert not other.rows, "a server without our options is followed"


def test_a_folder_is_made_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With those of servers that were killed; another's that lives is left alone."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, strange = (tmp_path / f"saccade-metrics-{what}" for what in ("killed", "strange"))
    for path in (killed, strange):
        path.mkdir()
    (killed / "lock").touch()
    with exporting() as alive, exporting() as folder:
        assert Path(alive).is_dir() and strange.is_dir() and not killed.exists()
        assert os.environ[VARIABLE] == folder
        Path(folder, "counter_1.db").touch()
    assert VARIABLE not in os.environ and not Path(folder).exists()


def test_the_users_folder_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = tmp_path / "figures"
    monkeypatch.setenv(VARIABLE, str(given))
    for left in range(2):
        with exporting() as folder:
            assert (folder, leftovers(folder)) == (str(given), left)
            Path(folder, "counter_1.db").touch()
    monkeypatch.setenv(VARIABLE, str(given / "counter_1.db"))
    with pytest.raises(ServingError, match=VARIABLE), exporting():
        raise AssertionError("a file is no folder")


def test_without_a_folder_the_log_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(metrics.logger, "info", lambda line, *parts: said.append(line % parts))
    metrics.exported.cache_clear()
    assert not metrics.exported()
    metrics.count("preemptions")
    assert len(said) == 1 and VARIABLE in said[0]


def test_last_steps_are_reported_once_no_more_come(read: Read, timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    report = StepMetrics(Counters(2, by_row=True), None, pause=1.0)
    report.step([10], [])
    now[0] = 100.6
    report.step([11], [])
    ((seconds, look),) = timers
    # The latest step is too young: it may not have been launched yet.
    now[0] = 101.0
    look()
    assert read("tokens_decoded") == 0
    assert [seconds, timers[1][0]] == [1.0, pytest.approx(0.6)]
    now[0] = 101.7
    timers[1][1]()
    assert read("tokens_decoded") == 2 and len(timers) == 2
    report.step([12], [])
    assert len(timers) == 3


def test_nobody_looks_while_a_step_may_be_captured(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM warms up with requests of its own right before it captures graphs."""
    counters = Counters(2, by_row=True)
    report = StepMetrics(counters, None, pause=1.0)
    report.step([10], [])
    report.disregard()
    asked: list[int] = []
    monkeypatch.setattr(counters, "totals", lambda: asked.append(1) or [(0.0,) * 4] * 2)
    report._latest -= 10
    for _, look in timers:
        look()
    assert not asked


def test_nothing_is_counted_while_an_engine_starts(read: Read, timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM drafts for requests of its own then."""
    counters = Counters(2, by_row=True)
    report = StepMetrics(counters, None, pause=1.0)

    def step(length: int, attended: int) -> None:
        report.step([length], [])
        counters.add([used(layer, [length], [[attended]]) for layer in range(2)])

    def warm_up(worker: Any) -> str:
        assert report.starting
        step(2000, 1000)
        report.again()
        report.verified("tidal", torch.ones(2, 3))
        return "done"

    # Later than the CUDA path: it imports vLLM's worker for CPUs.
    from saccade.adapters.vllm.worker import lossless

    worker: Any = object.__new__(lossless.LosslessWorker)
    worker.vllm_config = None
    monkeypatch.setattr(lossless.Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(lossless, "serving_of", lambda _: SimpleNamespace(metrics=report))
    assert worker.compile_or_warm_up_model() == "done" and not timers and not report.starting
    step(40, 20)
    report.flush()
    assert timers and [read(f"tokens_{what}") for what in ("decoded", "attended", "skipped")] == [1, 20, 20]


TWO_PROCESSES = """
import os, sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from saccade.adapters.vllm import metrics
if os.fork():
    os.wait()
    metrics.count("requests", 2, "quest")
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    sys.stdout.write(generate_latest(registry).decode())
else:
    metrics.count("requests", 3, "quest")
    metrics.metric("share_attended").set(0.25)
    metrics.metric("attention_recall").observe(0.5)
    os._exit(0)
"""


def test_processes_add_up(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", TWO_PROCESSES], {**os.environ, VARIABLE: str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    told = {'saccade_requests_total{policy="quest"} 5.0', "saccade_share_attended 0.25"}
    told |= {"saccade_attention_recall_sum 0.5", "saccade_attention_recall_count 1.0"}
    assert told <= {*done.stdout.splitlines()}
