"""vLLM's scheduler where drafts adapt: against a device whose time is known, then with engines that draft as told."""

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Engines
from lossless_runs import DRAFTED, SCRIPTED, SETTINGS, by_stock, check_heard, started_every_time
from scheduled import Engine, config, prompt
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu import cudagraph_utils

from saccade.adapters.vllm.lossless import ADAPTIVE, WORKER, lengths, speculation
from saccade.adapters.vllm.scheduler.draft_length import DraftLength
from saccade.checkpoints.bundled import model_path
from saccade.errors import ServingError

POLICY = "quest:budget=16,rectify=8:verify"


class Device:
    """Runs what a scheduler schedules: `kept` of every row's drafts stand, and its clock is all that passes.

    Drafts are made behind the step that asks for them. Of a step scheduled ahead the result is read before they are.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, kept: int, dense: float, sparse: float, ahead: bool, budget: int = 16
    ) -> None:
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
        monkeypatch.setattr("saccade.adapters.vllm.scheduler.adaptive.perf_counter", lambda: self.now)
        self.now, self.kept, self.dense, self.sparse, self.ahead = 0.0, kept, dense, sparse, ahead
        self.chosen, self.timed, self.judged = list[int](), list[tuple[int, int, float]](), Counter[tuple[int, int]]()
        self.expected, self.asked = Counter[tuple[int, int]](), list[int]()
        took, stood, following = DraftLength.took, DraftLength.stood, DraftLength.next

        def timed(policy: DraftLength, length: int, rows: int, tokens: int, seconds: float) -> None:
            self.timed.append((length, rows, seconds))
            took(policy, length, rows, tokens, seconds)

        def judged(policy: DraftLength, drafted: int, accepted: int) -> None:
            self.judged[drafted, accepted] += 1
            stood(policy, drafted, accepted)

        def asked(policy: DraftLength, rows: int, tokens: int) -> int:
            self.asked.append(rows)
            return following(policy, rows, tokens)

        monkeypatch.setattr(DraftLength, "next", asked)
        monkeypatch.setattr(DraftLength, "took", timed)
        monkeypatch.setattr(DraftLength, "stood", judged)
        settings: dict[str, Any] = {"max_model_len": 4096, "scheduler_cls": ADAPTIVE, "worker_cls": WORKER}
        settings |= {"speculative_config": speculation(str(model_path()), 8), "max_num_batched_tokens": 256}
        self.budget, policy = budget, f"quest:budget={budget},rectify=8:verify"
        self.engine = Engine(policy, blocks=4200, v2=True, ahead=ahead, **settings)
        self._under_way = deque[Any]()

    def cost(self, length: int) -> float:
        """Of a cycle of all rows, in which nothing else happens."""
        return (1.05 if length else 1) * self.dense + length * self.sparse

    def steps(self, count: int) -> None:
        scheduler = self.engine.scheduler
        for _ in range(count):
            output = scheduler.schedule()
            self._under_way.append(output)
            if output.num_scheduled_tokens:
                self.chosen.append(output.num_spec_tokens_to_schedule)
            through = [not scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens]
            lengths = [scheduler.requests[name].num_computed_tokens for name in output.num_scheduled_tokens]
            longest = max((length for length, one in zip(lengths, through, strict=True) if one), default=0)
            drafting = sum(through) * (longest > self.budget)
            assert (self.asked or [0]) == [drafting], "of those in a prompt nothing is drafted, nor of what is covered"
            assert drafting or not any(through) or output.num_spec_tokens_to_schedule == 0
            self.asked.clear()
            if len(self._under_way) > self.ahead:
                self._finish(self._under_way.popleft())

    def _finish(self, output: Any) -> None:
        names, drafts = list(output.num_scheduled_tokens), output.scheduled_spec_decode_tokens
        verified = max(map(len, drafts.values()), default=0)
        drafted = verified if self.ahead else output.num_spec_tokens_to_schedule
        self.now += (1.05 if verified else 1) * self.dense + drafted * self.sparse
        self.now += sum(0.01 * count for count in output.num_scheduled_tokens.values() if count > 8)
        sampled = []
        for name in names:
            kept = min(self.kept, len(drafts.get(name, ())))
            request = self.engine.scheduler.requests.get(name)
            through = request is None or not request.is_prefill_chunk
            sampled.append([7] * (kept + 1) if through else [])
            if name in drafts:
                self.expected[len(drafts[name]), kept] += 1
        rows = {name: row for row, name in enumerate(names)}
        self.engine.scheduler.update_from_output(output, ModelRunnerOutput(names, rows, sampled))
        if not self.ahead:
            ids = [[-1] * output.num_spec_tokens_to_schedule for _ in names]
            self.engine.scheduler.update_draft_token_ids(DraftTokenIds(names, ids))


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_cycles_are_timed_whole_and_alone(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither steps with a prompt, nor those in which the length changes."""
    device = Device(monkeypatch, kept=7, dense=20.0, sparse=7.0, ahead=ahead)
    device.engine.add("first", prompt(1000), 1500)
    device.engine.add("second", prompt(900, 3000), 1900)
    device.steps(120)
    assert device.chosen[:4] != [7] * 4 and Counter(device.chosen[60:])[7] > 40
    device.engine.add("third", prompt(700, 6000), 400)
    device.steps(250)
    assert not device.engine.scheduler.has_requests()
    assert {rows for _, rows, _ in device.timed} == {1, 2, 3} and {length for length, *_ in device.timed} >= {0, 1, 7}
    for length, _, seconds in device.timed:
        assert seconds == pytest.approx(device.cost(length)), length
    assert device.judged == device.expected and device.judged[7, 7] > 100


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_nothing_is_drafted_where_it_does_not_pay(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, kept=0, dense=5.0, sparse=5.0, ahead=ahead)
    device.engine.add("first", prompt(2000), 500)
    device.steps(400)
    assert Counter(device.chosen)[0] > 370 and {*device.chosen} == {0, 1}


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_nothing_is_drafted_while_the_budget_covers_all_rows(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, kept=7, dense=20.0, sparse=7.0, ahead=ahead, budget=512)
    device.engine.add("first", prompt(200), 1000)
    device.engine.add("second", prompt(100, 3000), 1000)
    device.steps(312)
    assert {*device.chosen} == {0} == {length for length, *_ in device.timed}
    device.steps(120)
    assert Counter(device.chosen[-80:]).most_common(1)[0][0] == 7, "once they are longer, drafts pay"


def test_whoever_names_the_scheduler_has_drafts() -> None:
    with pytest.raises(ServingError, match="AdaptiveScheduler needs a policy with rectify=8:verify"):
        Engine("quest:budget=16", scheduler_cls=ADAPTIVE)


@pytest.mark.parametrize("rows", [4, 28, 256])
def test_every_batch_has_a_graph_for_each_length(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the largest that vLLM captures: batches with drafts are found in full graphs, and stock's steps too."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    pool = lambda *_: None  # noqa: E731  # as short as what it stands for
    monkeypatch.setattr(type(cudagraph_utils.current_platform), "get_global_graph_pool", pool)
    given: dict[str, Any] = {"max_num_seqs": rows, "max_num_batched_tokens": 8192, "scheduler_cls": ADAPTIVE}
    told = config(POLICY, **given, worker_cls=WORKER, speculative_config=speculation(str(model_path()), 8))
    sizes = told.compilation_config
    # As on a GPU.
    sizes.cudagraph_mode, sizes.max_cudagraph_capture_size = CUDAGraphMode.FULL_AND_PIECEWISE, None
    sizes.cudagraph_capture_sizes, told.model_config.enforce_eager = None, False
    told._set_cudagraph_sizes()
    graphs = cudagraph_utils.CudaGraphManager(told, None, sizes.cudagraph_mode, told.num_speculative_tokens + 1)
    graphs._graphs_captured = True
    for length in lengths(8):
        for count in range(1, min(rows, 512 // (length + 1)) + 1):
            desc = graphs.dispatch(count, count * (length + 1), length + 1, 0, max_query_len=length + 1)
            assert (desc.cg_mode, desc.uniform_token_count) == (CUDAGraphMode.FULL, length + 1), (count, length)
            assert desc.num_reqs < count + 8 + count // 4


@pytest.mark.parametrize("engine", SCRIPTED, ids=["", "ahead"])
def test_answers_are_those_of_vllm_whatever_is_drafted(engine: dict[str, Any], all_engines: Engines) -> None:
    one = started_every_time()[engine["policy"], 8, "small"]
    check_heard(one["heard"], all_engines.by_stock(by_stock, **SETTINGS)["small"])
    steps = one["steps"]
    assert steps["lengths"] == (DRAFTED * len(steps["lengths"]))[: len(steps["lengths"])]
    assert len(steps["lengths"]) > len(DRAFTED) and steps["ahead"] == 1 + bool(engine.get("ahead"))
    assert steps["dense"] == steps["scheduled"] and steps["sparse"] == sum(steps["lengths"])
    assert steps["learned"] == steps["counted"] == [steps["drafted"], steps["accepted"]]
    assert 0 < steps["accepted"] < steps["drafted"]
    assert steps["planted"] == ("cluster" in engine["policy"]) * steps["selecting"]
