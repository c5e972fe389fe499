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


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Figures since the start of the test; they are kept in this process, whose environment names no folder."""
    monkeypatch.setattr(metrics, "exported", lambda: True)

    def now(name: str, *labels: str, sample: str = "") -> float:
        (family,) = metrics.metric(name, *labels).collect()
        found = [one.value for one in family.samples if not one.name.endswith("_created") and one.name.endswith(sample)]
        return float(found[0])

    before: dict[Any, float] = {}

    def since(name: str, *labels: str, sample: str = "") -> float:
        key = (name, labels, sample)
        return now(name, *labels, sample=sample) - before.get(key, 0.0)

    for name, (kind, _, labelled) in metrics.KINDS.items():
        if not labelled and kind != "Gauge":
            for sample in ("_count", "_sum") if kind == "Summary" else ("",):
                before[name, (), sample] = now(name, sample=sample)
    return since


def steps(lengths: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The length of the row at every token that is decoded behind the first."""
    return [length + step for length, count in zip(lengths, tokens, strict=True) for step in range(1, count)]


HEADED = "tidal:budget=64,reselect=7,heads=query"
COUNTED = (
    "dense",
    "quest:budget=64",
    "less_is_more:budget=64,reselect=7",
    "lychee_cluster:budget=96",
    "resa:min_pages=2,rectify=4",
    HEADED,
)


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
    cached = steps(LENGTHS, ANSWERS)
    attended, skipped = read("tokens_attended"), read("tokens_skipped")
    assert read("tokens_decoded") == len(cached)
    assert attended + skipped == pytest.approx(sum(cached))
    assert skipped == 0 if policy == "dense" else 0 < skipped < sum(cached)
    measured = read("attention_recall", sample="_count")
    assert measured == 0 if policy == "dense" else 0 < measured <= len(cached)
    assert 0 <= read("attention_recall", sample="_sum") <= measured + 1e-6
    passes = sum((count - 1) // 5 for count in ANSWERS) if policy.startswith("resa") else 0
    assert read("rectifications") == passes
    assert read("rectified_tokens") == 4 * passes


@pytest.mark.parametrize("policy", among((HEADED, "quest:budget=64"), (HEADED,)))
def test_figures_are_those_of_the_transformers_adapter(policy: str, all_engines: Engines, read: Read) -> None:
    (ids,) = prompts(200)
    answers(counting(all_engines, policy), [ids], greedy(9))
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    with sparsify(model, policy) as run, torch.no_grad():
        prompt = torch.tensor([ids])
        settings = GenerationConfig(do_sample=False, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        layers = run.stats().layers
    assert read("tokens_attended") == pytest.approx(sum(layer.tokens * layer.steps for layer in layers) / len(layers))


class Recalled:
    """What was measured in each layer; one that nobody has seen is dense."""

    def __init__(self, *layers: MeanRecall | None) -> None:
        self.layers = [*layers]

    def per_layer(self) -> list[MeanRecall | None]:
        return self.layers


HALF = MeanRecall(0.25, 0.5, 1.0), None, MeanRecall(0.75, 0.5, 1.0), MeanRecall(None, None, 0.0)
"""On average 0.5."""


@pytest.mark.parametrize("pause", [0.0, 1000.0])
def test_warm_ups_are_nobodys(pause: float, read: Read) -> None:
    counters = Counters(4, by_row=True)
    report = StepMetrics(counters, Recalled(*HALF), pause)  # type: ignore[arg-type]

    def attend(tokens: int, rows: int = 1) -> None:
        for layer in range(4):
            counters.add([used(layer, [2000] * rows, [[tokens]] * rows)])
            report.layer_done(layer)

    report.disregard()
    attend(1000)
    report.step([40, 60], [10])
    report.measured(2)
    attend(20, rows=2)
    report.disregard()
    attend(1000)
    report.disregard()
    attend(1000)
    report.step([50], [])
    attend(30)
    if pause:
        report.flush()
    assert read("tokens_decoded") == 4
    assert read("tokens_attended") == pytest.approx(20 + 20 + 10 + 30)
    assert read("tokens_skipped") == pytest.approx(100 - 40 + 50 - 30)
    assert read("attention_recall", sample="_count") == 2
    assert read("attention_recall", sample="_sum") == pytest.approx(1.0)
    assert read("attention_recall_with_dense", sample="_count") == 2
    assert read("attention_recall_with_dense", sample="_sum") == pytest.approx(2 * (0.5 + 1 + 0.5 + 1) / 4)
    assert metrics.metric("share_attended").collect()[0].samples[0].value == pytest.approx(80 / 160)


def test_a_step_that_is_replayed_has_longer_rows(read: Read) -> None:
    report = StepMetrics(Counters(2, by_row=True), None, 1000.0)
    report.step([40, 60], [10])
    for _ in range(2):
        report.again()
    report.flush()
    assert read("tokens_decoded") == 9
    assert read("tokens_attended") == 10 + 11 + 12
    assert read("tokens_skipped") == 100 + 102 + 104


def test_a_look_in_the_middle_of_a_step_does_not_count_what_it_measures(read: Read) -> None:
    recall = Recalled(None, None)
    report = StepMetrics(Counters(2, by_row=True), recall, 1000.0)  # type: ignore[arg-type]
    for _ in range(2):
        report.step([40], [])
        report.measuring(1)
        report.flush()
        for layer in range(2):
            recall.layers[layer] = MeanRecall(0.75, 0.5, 1.0)
            report.layer_done(layer)
    report.step([41], [])
    report.flush()
    assert read("attention_recall", sample="_count") == 2
    assert read("attention_recall", sample="_sum") == pytest.approx(1.5)


def test_an_accelerator_is_read_once_in_a_while(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(2, by_row=True)
    looked = []
    monkeypatch.setattr(counters, "totals", lambda: looked.append(now[0]) or [(0.0, 0.0, 0.0, 0.0)] * 2)
    now = [100.0]
    monkeypatch.setattr("saccade.adapters.vllm.metrics.time.monotonic", lambda: now[0])
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
    came: list[RequestRow] = []
    emptied: list[bool] = []
    rows.arrived, rows.emptied = came.append, lambda: emptied.append(True)
    params, prompt = SamplingParams(), [1, 2, 3]
    first, second, third = [], [], []  # type: ignore[var-annotated]
    rows.update_state(update([(0, params, prompt, first), (1, params, prompt, second)]))
    rows.update_state(update(moved=[(1, 0, MoveDirectionality.SWAP)]))
    assert len(came) == 2
    # Out before its first token, and back when the other has had one and gives it its place.
    rows.update_state(update(removed=[0]))
    first.append(7)
    rows.update_state(update([(0, params, prompt, second), (1, params, prompt, third)]))
    rows.update_state(update([(2, params, prompt, first)]))
    assert len(came) == 3
    assert [rows.rows[index].output for index in range(3)] == [second, third, first]
    assert not emptied
    rows.update_state(update(removed=[0, 1, 2]))
    assert emptied
    assert not rows.rows


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
    assert rows.rows[3] is first
    assert first.resumed
    # A streaming session goes on with another prompt and the same list.
    rows.update_state(update([(3, SamplingParams(), [1, 2], waiting)]))
    assert rows.rows[3] is not first
    assert rows.rows[3].resumed


def test_slots_of_model_runner_v2_are_filled_anew(rows: RequestRows) -> None:
    came: list[RequestRow] = []
    rows.arrived = came.append
    lengths = SimpleNamespace(np=[5, 5])
    rows._slots = SimpleNamespace(prompt_len=lengths, prefill_len=SimpleNamespace(np=[5, 9]))
    assert rows.add_request(0, SamplingParams()) is False
    rows.add_request(1, SamplingParams())  # with four tokens of its answer
    assert [row is rows.rows[0] for row in came] == [True]
    assert rows.rows[1].decodes(9, True)
    assert not rows.rows[0].decodes(9, True)


def test_a_server_without_our_options_is_not_followed() -> None:
    rows = RequestRows(SimpleNamespace(additional_config={}))
    rows.update_state(update([(0, SamplingParams(), [1], [])]))
    rows.add_request(0, SamplingParams())
    assert not rows.rows


def test_a_folder_is_made_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With those of servers that were killed; another's that lives is left alone."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, strange = tmp_path / "saccade-metrics-killed", tmp_path / "saccade-metrics-strange"
    for path in (killed, strange):
        path.mkdir()
    (killed / "lock").touch()
    with exporting() as alive, exporting() as folder:
        assert Path(alive).is_dir() and strange.is_dir() and not killed.exists()
        assert os.environ[VARIABLE] == folder
        assert Path(folder).is_dir()
        Path(folder, "counter_1.db").touch()
    assert VARIABLE not in os.environ
    assert not Path(folder).exists()


def test_the_users_folder_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = tmp_path / "figures"
    monkeypatch.setenv(VARIABLE, str(given))
    with exporting() as folder:
        assert folder == str(given)
        assert leftovers(folder) == 0
        Path(folder, "counter_1.db").touch()
    with exporting() as folder:
        assert leftovers(folder) == 1
    monkeypatch.setenv(VARIABLE, str(given / "counter_1.db"))
    with pytest.raises(ServingError, match=VARIABLE), exporting():
        raise AssertionError("a file is no folder")


def test_without_a_folder_the_log_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(metrics.logger, "info", lambda line, *parts: said.append(line % parts))
    metrics.exported.cache_clear()
    assert not metrics.exported()
    metrics.count("preemptions")
    (line,) = said
    assert VARIABLE in line


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
    done = subprocess.run(
        [sys.executable, "-c", TWO_PROCESSES],
        env={**os.environ, VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = {'saccade_requests_total{policy="quest"} 5.0', "saccade_share_attended 0.25"}
    told |= {"saccade_attention_recall_sum 0.5", "saccade_attention_recall_count 1.0"}
    assert told <= {*done.stdout.splitlines()}


class Timers:
    """Stands in for `threading.Timer`; nothing runs until it is told to."""

    def __init__(self) -> None:
        self.started: list[tuple[float, Any]] = []

    def __call__(self, seconds: float, look: Any) -> Any:
        return SimpleNamespace(start=lambda: self.started.append((seconds, look)))


def test_the_last_steps_are_reported_once_no_more_come(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    timers, now = Timers(), [100.0]
    monkeypatch.setattr("saccade.adapters.vllm.metrics.threading.Timer", timers)
    monkeypatch.setattr("saccade.adapters.vllm.metrics.time.monotonic", lambda: now[0])
    report = StepMetrics(Counters(2, by_row=True), None, pause=1.0)
    report.step([10], [])
    now[0] = 100.6
    report.step([11], [])
    ((seconds, look),) = timers.started
    assert seconds == 1.0
    # The latest step is too young: it may not have been launched yet.
    now[0] = 101.0
    look()
    assert read("tokens_decoded") == 0
    assert timers.started[1][0] == pytest.approx(0.6)
    now[0] = 101.7
    timers.started[1][1]()
    assert read("tokens_decoded") == 2
    assert len(timers.started) == 2
    report.step([12], [])
    assert len(timers.started) == 3


def test_nobody_looks_while_a_step_may_be_captured(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM warms up with requests of its own right before it captures graphs."""
    timers, counters = Timers(), Counters(2, by_row=True)
    monkeypatch.setattr("saccade.adapters.vllm.metrics.threading.Timer", timers)
    report = StepMetrics(counters, None, pause=1.0)
    report.step([10], [])
    report.disregard()
    asked: list[int] = []
    monkeypatch.setattr(counters, "totals", lambda: asked.append(1) or [(0.0,) * 4] * 2)
    report._latest -= 10
    for _, look in timers.started:
        look()
    assert not asked
