"""Drafts that adapt: on machines of known costs and texts never far from what would have been best.

In vLLM's scheduler, against a device whose time is known; and with engines that draft as told.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Engines
from loads import DRAFTED, SCRIPTED, SETTINGS, by_stock, check_heard, started_every_time
from scheduled import Engine, config, prompt
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu import cudagraph_utils

from saccade.adapters.vllm.lossless import ADAPTIVE, WORKER, lengths, speculation
from saccade.adapters.vllm.scheduler.draft_length import DraftLength
from saccade.checkpoints.bundled import model_path
from saccade.errors import ServingError

MOST = 8
SHARES = (0.984, 0.95, 0.9, 0.5, 0.0)


@dataclass(frozen=True)
class Machine:
    """Rows of one length; milliseconds of a dense step and of a sparse one, as an H200 takes them for 8B parameters."""

    rows: int
    context: int
    dense: float
    sparse: float

    def cost(self, length: int) -> float:
        """Of a cycle: an undrafted one is stock's step, a pass that verifies has some of its own."""
        if length == 0:
            return self.dense
        return 1.03 * self.dense + 0.3 + 0.0015 * self.rows * (length + 1) + length * self.sparse

    def pace(self, length: int, share: float) -> float:
        """Tokens a row gains in a millisecond, if a draft stands with this chance once those before it do."""
        return sum(share**place for place in range(length + 1)) / self.cost(length)

    def best(self, share: float) -> float:
        return max(self.pace(length, share) for length in range(MOST + 1))


SHORT, SHORT_BATCH = Machine(1, 2048, 4.93, 5.0), Machine(4, 16384, 7.0, 5.5)
LONG, LONG_BATCH = Machine(1, 131072, 8.98, 5.66), Machine(4, 131072, 20.7, 7.5)
MACHINES = (SHORT, Machine(1, 16384, 5.4, 5.2), SHORT_BATCH, Machine(8, 32768, 12.8, 6.7), LONG, LONG_BATCH)


def decode(policy: DraftLength, cycles: Iterable[tuple[Machine, float]], seed: int = 0) -> list[int]:
    """The lengths of some cycles: times scatter by 5%, and what one says is known once the next is chosen."""
    chance, chosen, under_way = random.Random(seed), list[int](), deque[tuple[int, list[int], tuple[Any, ...] | None]]()
    for machine, share in cycles:
        tokens = machine.rows * machine.context
        length = policy.next(machine.rows, tokens)
        stood = [next((n for n in range(length) if chance.random() >= share), length) for _ in range(machine.rows)]
        seconds = machine.cost(length) * math.exp(chance.gauss(0, 0.05)) / 1000
        # The first cycle of a length has the drafts of the one before, as where steps are not scheduled ahead.
        timed = (length, machine.rows, tokens, seconds) if chosen[-1:] == [length] else None
        under_way.append((length, stood if length else [], timed))
        if len(under_way) > 1:
            drafted, counts, took = under_way.popleft()
            for count in counts:
                policy.stood(drafted, count)
            if took:
                policy.took(*took)
        chosen.append(length)
    return chosen


def worth(chosen: list[int], machine: Machine, share: float) -> float:
    """Tokens that these cycles are expected to give, over those that the best length gives in the same time."""
    tokens = sum(machine.pace(length, share) * machine.cost(length) for length in chosen)
    return tokens / sum(map(machine.cost, chosen)) / machine.best(share)


@pytest.mark.parametrize("share", SHARES)
def test_no_length_would_have_been_better(share: float) -> None:
    """By 3% over 2,000 cycles, stock's undrafted steps among them; and what is best is found within 200."""
    for machine in MACHINES:
        for seed in (0, 2):  # in the second one row of 128K tokens is unlucky at first
            chosen = decode(DraftLength(lengths(MOST)), [(machine, share)] * 2000, seed)
            assert worth(chosen, machine, share) > 0.97, (machine, seed)
            assert worth(chosen[200:400], machine, share) > 0.94, (machine, seed)


def test_lengths_are_those_that_graphs_are_made_for() -> None:
    assert [lengths(most) for most in (1, 2, 4, 8, 15)] == [(0, 1), (0, 1), (0, 1, 3), (0, 1, 3, 7), (0, 1, 3, 7, 15)]
    chosen = decode(DraftLength(lengths(15)), [(LONG_BATCH, 1.0)] * 400)
    assert {*chosen} == {*lengths(15)} and fmean(chosen[200:]) > 12


def test_what_loses_is_tried_ever_more_seldom() -> None:
    """After 64 cycles, 128 … 4,096; and after 64 once the batch has grown, though it is one that is known."""
    policy, eight = DraftLength(lengths(MOST)), replace(SHORT, rows=8)
    known = [*[(eight, 0.0)] * 3000, *[(SHORT, 0.0)] * 12000]
    chosen = decode(policy, [*known, *[(eight, 0.0)] * 100])
    tried = [cycle for cycle in range(3000, 15000) if chosen[cycle] and not chosen[cycle - 1]]
    gaps = [after - before for before, after in pairwise(tried)]
    for gap, expected in zip(gaps, (64, 128, 256, 512, 1024, 2048, 4096), strict=False):
        assert abs(gap - expected) <= 16
    assert len(gaps) == 7 and {*chosen[3100:15000]} == {0, 1}
    assert any(chosen[15000:15080])


def test_drafts_stop_when_they_stop_to_stand_and_come_back() -> None:
    """Within 64 cycles; back as soon as they are tried, which takes no longer than they have lost."""
    for machine in (LONG, LONG_BATCH):
        shares = [0.984] * 1000 + [0.0] * 1000 + [0.984] * 1100
        chosen = decode(DraftLength(lengths(MOST)), [(machine, share) for share in shares])
        assert fmean(chosen[900:1000]) > 6
        assert fmean(chosen[1064:2000]) < 0.05
        assert fmean(chosen[3050:]) > 6


def test_each_batch_has_a_length_of_its_own() -> None:
    """Rows come and go, and contexts grow; a batch that comes back is known."""
    cycles = [(machine, 0.95) for _ in range(3) for machine in (SHORT, LONG_BATCH) for _ in range(250)]
    chosen = decode(DraftLength(lengths(MOST)), cycles)
    assert [fmean(chosen[start : start + 250]) > 4 for start in range(0, 1500, 250)] == [False, True] * 3
    assert fmean(chosen[1250:1260]) > 6, "it was looked for again"
    grown = [replace(LONG_BATCH, context=context, dense=4.9 + context / 8300) for context in range(2000, 132000, 65)]
    chosen = decode(DraftLength(lengths(MOST)), [(machine, 0.95) for machine in grown])
    lost = [machine.pace(length, 0.95) / machine.best(0.95) for machine, length in zip(grown, chosen, strict=True)]
    assert fmean(lost) > 0.96


def test_one_step_that_hangs_decides_nothing() -> None:
    policy = DraftLength(lengths(MOST))
    policy.took(0, LONG.rows, LONG.context, 60.0)
    assert worth(decode(policy, [(LONG, 0.5)] * 400), LONG, 0.5) > 0.9


POLICY = "quest:budget=16,rectify=8:verify"


def noting(method: Callable[..., Any], seen: list[tuple[Any, ...]]) -> Callable[..., Any]:
    def noted(policy: DraftLength, *given: Any) -> Any:
        seen.append(given)
        return method(policy, *given)

    return noted


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
        self.chosen, self.expected = list[int](), Counter[tuple[int, int]]()
        # What the policy is told: of cycles length, rows, tokens and seconds; drafted and accepted; rows and tokens.
        self.timed, self.judged, self.asked = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        for name, seen in (("took", self.timed), ("stood", self.judged), ("next", self.asked)):
            monkeypatch.setattr(DraftLength, name, noting(getattr(DraftLength, name), seen))
        settings: dict[str, Any] = {"max_model_len": 4096, "scheduler_cls": ADAPTIVE, "worker_cls": WORKER}
        settings |= {"speculative_config": speculation(str(model_path()), 8), "max_num_batched_tokens": 256}
        self.budget, policy = budget, f"quest:budget={budget},rectify=8:verify"
        self.engine = Engine(policy, blocks=4200, v2=True, ahead=ahead, **settings)
        self._under_way = deque[Any]()

    def cost(self, length: int) -> float:
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
            assert [rows for rows, _ in self.asked or [(0, 0)]] == [drafting], "who has a prompt or is covered drafts"
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
    assert {rows for _, rows, *_ in device.timed} == {1, 2, 3} and {length for length, *_ in device.timed} >= {0, 1, 7}
    for length, *_, seconds in device.timed:
        assert seconds == pytest.approx(device.cost(length)), length
    assert Counter(device.judged) == device.expected and device.expected[7, 7] > 100


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_nothing_is_drafted_where_it_does_not_pay(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the budget covers all rows, and where no draft stands."""
    device = Device(monkeypatch, kept=7, dense=20.0, sparse=7.0, ahead=ahead, budget=512)
    device.engine.add("first", prompt(200), 1000)
    device.engine.add("second", prompt(100, 3000), 1000)
    device.steps(312)
    assert {*device.chosen} == {0} == {length for length, *_ in device.timed}
    device.steps(120)
    assert Counter(device.chosen[-80:]).most_common(1)[0][0] == 7, "once they are longer, drafts pay"
    device = Device(monkeypatch, kept=0, dense=5.0, sparse=5.0, ahead=ahead)
    device.engine.add("first", prompt(2000), 500)
    device.steps(400)
    assert Counter(device.chosen)[0] > 370 and {*device.chosen} == {0, 1}


def test_whoever_names_the_scheduler_has_drafts() -> None:
    with pytest.raises(ServingError, match="AdaptiveScheduler needs a policy with rectify=8:verify"):
        Engine("quest:budget=16", scheduler_cls=ADAPTIVE)


@pytest.mark.parametrize("rows", [4, 28, 256])
@pytest.mark.usefixtures("runner_v2")
def test_every_batch_has_a_graph_for_each_length(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the largest that vLLM captures: batches with drafts are found in full graphs, and stock's steps too."""
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
