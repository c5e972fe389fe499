"""vLLM's real scheduler and cache manager with dense passes, against a worker that only remembers what it was told.

The worker writes into each slot which tokens it stands for and whether it is clean: computed densely from clean slots.
So a wrong token, a block of another request or a published sparse step shows, whatever the scheduler believes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from saccade import ServingError, sparsify
from saccade.adapters.vllm import clean
from saccade.adapters.vllm.cache_spec import SaccadeAttentionSpec, register_cache_spec
from saccade.adapters.vllm.checks import SCHEDULER, reasons_against_rectifying
from saccade.adapters.vllm.scheduler import RectifyingScheduler
from saccade.checkpoints.bundled import model_path
from saccade.plans.rectify import Rectify

BLOCK = 4
OFF = {"saccade": "off"}


@pytest.fixture(autouse=True)
def _registered() -> None:
    init_none_hash(sha256)
    register_cache_spec()


def config(policy: str, **settings: Any) -> Any:
    """A configuration as the command line makes it."""
    given = {
        "model": str(model_path()),
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "scheduler_cls": SCHEDULER,
        "async_scheduling": False,
        "additional_config": {"saccade": {"policy": policy}},
    }
    return EngineArgs(**{**given, **settings}).create_engine_config()


def cache(policy: str, blocks: int, covered: int) -> KVCacheConfig:
    """What the workers' cache specification makes of a model of one layer."""
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    spec = SaccadeAttentionSpec.of(layer, policy, covered=covered)
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])


@dataclass
class Known:
    """What a worker knows of a request; below `prefill`, the tokens that it was sent, a single one is dense."""

    tokens: list[int]
    computed: int
    blocks: list[int]
    prefill: int
    sparse: bool


@dataclass
class Worker:
    """Follows scheduler outputs as model runner V1 does, or, with `v2`, keeps its own count as V2 does.

    Attributes:
        covered: rows up to which one-token steps are exact.
        steps: of each request, `(start, tokens)` of all steps.
        slots: of each block and offset, the tokens up to there and whether it is clean.
        found: slots that each request was given when it first came.
        given: requests that came in this step, with slots that they have not computed.
    """

    covered: int = 0
    v2: bool = False
    known: dict[str, Known] = field(default_factory=dict)
    steps: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    slots: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def run(self, output: Any) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set() if self.v2 else set()):
            self.known.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._enter(new)
        self._update(output.scheduled_cached_reqs)
        sampled = [self._step(request_id, count) for request_id, count in output.num_scheduled_tokens.items()]
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled)

    def clean(self, request_id: str) -> list[bool]:
        """Of each slot that a request has computed or was given."""
        known = self.known[request_id]
        return [self.slots[known.blocks[place // BLOCK], place % BLOCK][1] for place in range(known.computed)]

    def _enter(self, new: Any) -> None:
        tokens = list(new.prefill_token_ids if self.v2 else new.prompt_token_ids)
        sparse = (new.sampling_params.extra_args or {}).get("saccade") != "off"
        known = Known(tokens, new.num_computed_tokens, list(new.block_ids[0]), len(tokens), sparse)
        self.known[new.req_id] = known
        self.given.add(new.req_id)
        self.found.setdefault(new.req_id, known.computed)

    def _update(self, cached: Any) -> None:
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request_id, computed, blocks in rows:
            known = self.known[request_id]
            if self.v2:
                assert computed == known.computed, "model runner V2 does not listen to this number"
            if request_id in cached.resumed_req_ids:
                self.given.add(request_id)
                known.blocks = []
            known.computed = computed
            known.blocks += blocks[0] if blocks is not None else []

    def _slot(self, known: Known, position: int) -> tuple[int, bool]:
        held, clean = self.slots[known.blocks[position // BLOCK], position % BLOCK]
        assert held == hash(tuple(known.tokens[: position + 1])), "a slot holds another text"
        return held, clean

    def _step(self, request_id: str, count: int) -> list[int]:
        known = self.known[request_id]
        if request_id in self.given:
            # Not before those in front of it, which may compute in this very step what it was given.
            self.given.remove(request_id)
            assert all(self._slot(known, place)[1] for place in range(known.computed)), "given what a sparse step wrote"
        start, end = known.computed, known.computed + count
        self.steps[request_id].append((start, count))
        assert end <= len(known.tokens)
        exact = count > 1 or start < known.prefill or not known.sparse or end <= self.covered
        clean = exact and all(self._slot(known, position)[1] for position in range(start))
        for position in range(start, end):
            text = hash(tuple(known.tokens[: position + 1]))
            self.slots[known.blocks[position // BLOCK], position % BLOCK] = (text, clean)
        known.computed = end
        if end < len(known.tokens):
            return []
        known.tokens.append(hash(tuple(known.tokens)) % 997 + 3)
        return [known.tokens[-1]]


class Engine:
    """A scheduler and a worker, stepped by hand."""

    def __init__(self, policy: str, *, blocks: int = 400, covered: int = 0, v2: bool = False, **settings: Any) -> None:
        vllm_config = config(policy, **settings)
        vllm_config.cache_config.num_gpu_blocks = blocks
        self.worker = Worker(covered, v2)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))
            self.scheduler: Any = vllm_config.scheduler_config.get_scheduler_cls()(
                vllm_config=vllm_config,
                kv_cache_config=cache(policy, blocks, covered),
                structured_output_manager=StructuredOutputManager(vllm_config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        assert self.scheduler.use_v2_model_runner == v2
        self.requests: dict[str, Request] = {}
        self.outputs: list[Any] = []

    def add(self, name: str, prompt: Sequence[int], tokens: int, **settings: Any) -> Request:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **settings.pop("params", {}))
        request = Request(name, list(prompt), params, None, block_hasher=self.hasher, **settings)
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.outputs.append(output)
        self.scheduler.update_from_output(output, self.worker.run(output))
        for request in self.scheduler.running:
            boundary = clean.known_boundary(request)
            states = self.worker.clean(request.request_id)
            assert all(states[:boundary]), "the boundary is drawn behind what a sparse step wrote"
        return output

    def finish(self, limit: int = 4000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.requests
        assert not self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.scheduler.kv_cache_config.num_blocks - 1, "all but the null block"


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def phase(length: int, tokens: int, every: int, covered: int = 0) -> list[tuple[int, int]]:
    """`(start, tokens)` of all steps behind the prompt: the rule of the documentation, as one plain loop."""
    steps, past, counted = [], length, length
    for _ in range(tokens - 1):
        if past - counted == every and past + 1 > covered:
            steps.append((counted, every + 1))
        else:
            steps.append((past, 1))
        counted = past + 1 if past - counted == every else counted
        past += 1
    return steps


def decoding(engine: Engine, name: str, length: int) -> list[tuple[int, int]]:
    """`(start, tokens)` of the steps that ran a token behind the prompt."""
    return [(start, count) for start, count in engine.worker.steps[name] if start + count > length]


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("every", [1, 2, 5, 32])
@pytest.mark.parametrize("length", [1, 7, 8, 130])
def test_phase(length: int, every: int, v2: bool) -> None:
    engine = Engine(f"quest:budget=16,rectify={every}", v2=v2)
    request = engine.add("a", prompt(length), 80)
    while len(request.output_token_ids) < 79:
        engine.step()
        assert not request.is_prefill_chunk or request.num_computed_tokens < length, "what structured output asks for"
    expected = phase(length, 80, every)
    assert decoding(engine, "a", length) == expected[:78]
    passes = sum(count > 1 for _, count in expected[:78])
    assert engine.scheduler.rectifications == passes
    assert engine.scheduler.rectified_tokens == passes * every
    engine.finish()
    assert decoding(engine, "a", length) == expected


def test_every_pass_leaves_the_cache_clean() -> None:
    engine = Engine("quest:budget=16,rectify=5")
    request = engine.add("a", prompt(9), 40)
    passes = 0
    while len(request.output_token_ids) < 39:
        output = engine.step()
        clean = engine.worker.clean("a")
        if output.num_scheduled_tokens["a"] == 6:
            passes += 1
            assert all(clean)
        elif len(request.output_token_ids) > 1:
            assert not clean[-1], "the test's worker must tell sparse steps from dense ones"
    assert passes == 6


def lengths_in_transformers(policy: str, length: int, tokens: int) -> list[int]:
    """Positions in each call of the decoder, in the transformers adapter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 32, "eos_token_id": None, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).eval()
    seen: list[int] = []
    with sparsify(model, policy):
        model.get_decoder().layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
        ids = torch.randint(1, 32, (1, length))
        settings = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return seen[1:]


@pytest.mark.parametrize(("budget", "covered"), [(16, 0), (30, 30), (4096, 512)])
@pytest.mark.parametrize("every", [1, 3, 8])
def test_phase_is_that_of_transformers(every: int, budget: int, covered: int) -> None:
    policy = f"streaming:budget={budget},rectify={every}"
    theirs = lengths_in_transformers(policy, 18, 50)
    engine = Engine(policy, covered=covered)
    engine.add("a", prompt(18), 50)
    engine.finish()
    assert [count for _, count in decoding(engine, "a", 18)] == theirs
    assert (max(theirs) > 1) == (budget < 68)


@pytest.mark.parametrize("covered", [19, 20, 24, 25, 26, 31])
def test_covered_rows_are_not_run_again_and_the_phase_goes_on(covered: int) -> None:
    engine = Engine("quest:budget=16,rectify=4", covered=covered)
    engine.add("a", prompt(14), 60)
    engine.finish()
    steps = decoding(engine, "a", 14)
    assert steps == phase(14, 60, 4, covered)
    assert min(start + count for start, count in steps if count > 1) > covered
    assert {(start + count - 14) % 5 for start, count in steps if count > 1} == {0}


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("budget", [5, 6, 8, 11, 16, 40])
def test_passes_wait_for_room_and_are_never_cut(budget: int, v2: bool) -> None:
    """The smallest budgets hold one pass of 5; six requests are due at once again and again."""
    seqs = min(budget, 6)
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=budget, max_num_seqs=seqs, v2=v2)
    for index in range(6):
        engine.add(str(index), prompt(7 + index, 50 * index), 30)
    engine.finish()
    for index in range(6):
        assert decoding(engine, str(index), 7 + index) == phase(7 + index, 30, 4)
    assert all(sum(output.num_scheduled_tokens.values()) <= budget for output in engine.outputs)
    waits = sum(len(output.num_scheduled_tokens) < len(engine.worker.steps) for output in engine.outputs)
    assert waits if budget < 30 else True


def test_nobody_starves() -> None:
    """Half as many tokens in a step as all would need: the last to come makes progress like the others."""
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=8)
    requests = [engine.add(str(index), prompt(5, 50 * index), 60) for index in range(8)]
    while all(len(request.output_token_ids) < 60 for request in requests):
        engine.step()
    assert min(len(request.output_token_ids) for request in requests) >= 60 // 3
    engine.finish()


def test_dense_neighbours_do_not_keep_a_pass_waiting_for_ever() -> None:
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=8)
    for index in range(6):
        engine.add(str(index), prompt(5, 50 * index), 400, params={"extra_args": OFF})
    request = engine.add("sparse", prompt(5, 900), 50)
    for _ in range(150):
        engine.step()
    assert len(request.output_token_ids) == 50
    assert decoding(engine, "sparse", 5) == phase(5, 50, 4)


def test_a_long_prompt_in_front_does_not_take_a_pass_its_tokens() -> None:
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=32, long_prefill_token_threshold=24)
    engine.add("long", prompt(300), 2)
    engine.add("a", prompt(6, 900), 30)
    engine.finish()
    assert decoding(engine, "a", 6) == phase(6, 30, 4)
    passing = [output.num_scheduled_tokens for output in engine.outputs if output.num_scheduled_tokens.get("a") == 5]
    assert any("long" in scheduled for scheduled in passing)
    assert [request.request_id for request in engine.scheduler.running] == []


def test_the_order_of_running_requests_is_kept() -> None:
    """vLLM preempts the last one: whose turn it is must not decide about that."""
    engine = Engine("quest:budget=16,rectify=4")
    for index in range(4):
        engine.add(str(index), prompt(5 + index, 50 * index), 60)
        engine.step()
    for _ in range(30):
        engine.step()
        assert [request.request_id for request in engine.scheduler.running] == ["0", "1", "2", "3"]


def second_turn(policy: str, covered: int, first: int, tokens: int, **params: Any) -> tuple[int, list[int]]:
    """How many tokens of the first turn the second finds in the prefix cache, and that whole first turn."""
    engine = Engine(policy, covered=covered)
    request = engine.add("first", prompt(first), tokens, params=params)
    engine.finish()
    text = [*request.all_token_ids, 7, 8, 9]
    engine.add("second", text, 5)
    engine.finish()
    return engine.worker.found["second"], text


@pytest.mark.parametrize(("first", "tokens"), [(9, 1), (9, 20), (10, 31), (12, 32), (15, 33), (16, 16)])
def test_a_second_turn_finds_what_is_clean(first: int, tokens: int) -> None:
    """The worker checks every slot that a request is given; here: that it is given all of them."""
    last = first + tokens - 1
    assert second_turn("quest:budget=16", 0, first, tokens)[0] == first // BLOCK * BLOCK
    assert second_turn("quest:budget=16", 17, first, tokens)[0] == min(max(first, 17), last) // BLOCK * BLOCK
    assert second_turn("dense", 512, first, tokens)[0] == last // BLOCK * BLOCK
    assert second_turn("quest:budget=16", 0, first, tokens, extra_args=OFF)[0] == last // BLOCK * BLOCK
    clean = first + (tokens - 1) // 6 * 6
    for covered in (0, 17, 512):
        assert second_turn("quest:budget=16,rectify=5", covered, first, tokens)[0] == clean // BLOCK * BLOCK


def test_opting_out_is_dense_and_never_run_again() -> None:
    engine = Engine("quest:budget=16,rectify=3")
    request = engine.add("a", prompt(9), 40, params={"extra_args": OFF})
    engine.add("b", prompt(9, 500), 40)
    while not request.is_finished():
        engine.step()
        assert "a" not in engine.worker.known or all(engine.worker.clean("a"))
    engine.finish()
    assert decoding(engine, "a", 9) == [(9 + index, 1) for index in range(39)]
    assert decoding(engine, "b", 9) == phase(9, 40, 3)


@pytest.mark.parametrize("v2", [False, True])
def test_preemption(v2: bool) -> None:
    """Too few blocks for all: some are computed anew, densely, and count from there."""
    engine = Engine("quest:budget=16,rectify=5", blocks=30, v2=v2, max_num_batched_tokens=32)
    requests = [engine.add(str(index), prompt(9, 50 * index), 40) for index in range(4)]
    engine.finish()
    assert engine.scheduler.preemptions == sum(request.num_preemptions for request in requests) > 0
    for index, request in enumerate(requests):
        steps = decoding(engine, str(index), 9)
        assert len(request.output_token_ids) == 40
        if not request.num_preemptions:
            assert steps == phase(9, 40, 5)
            continue
        resumed = max(place for place, step in enumerate(steps) if place and step[0] + step[1] > 20 and step[1] > 6)
        begun = sum(steps[resumed])
        assert steps[resumed + 1 :] == phase(begun, 40 + 9 - begun, 5)


def test_one_token_of_a_recomputation_is_taken_again() -> None:
    """A worker takes a single token behind the prompt for a sparse step."""
    engine = Engine("quest:budget=16,rectify=5", max_num_batched_tokens=8, enable_prefix_caching=False)
    request = engine.add("a", prompt(9), 40)
    while len(request.output_token_ids) < 20:
        engine.step()
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.waiting.remove_requests([request])
    for index in range(7):
        engine.add(str(index), prompt(3, 50 * index), 30, params={"extra_args": OFF})
    while len(engine.scheduler.running) < 7:
        engine.step()
    engine.scheduler.waiting.prepend_request(request)
    before = len(engine.worker.steps["a"])
    while request.num_computed_tokens < 28:
        engine.step()
    singles = [start for start, count in engine.worker.steps["a"][before:] if count == 1]
    assert singles.count(9) > 1
    assert all(engine.worker.clean("a")[:28]), "all but the last token, which may have been left alone"
    engine.finish()


def test_abort_in_the_middle() -> None:
    engine = Engine("quest:budget=16,rectify=4", max_num_batched_tokens=9)
    for index in range(5):
        engine.add(str(index), prompt(7, 50 * index), 60)
    for _ in range(20):
        engine.step()
    held = next(iter(engine.scheduler._held), "0")
    engine.scheduler.finish_requests([held, "3"], RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        engine.step()
    between = engine.scheduler.schedule()
    engine.scheduler.finish_requests(["4"], RequestStatus.FINISHED_ABORTED)
    engine.scheduler.update_from_output(between, engine.worker.run(between))
    engine.finish()
    for index in {0, 1, 2} - {int(held)}:
        assert decoding(engine, str(index), 7) == phase(7, 60, 4)
    assert held not in engine.scheduler._held


def test_a_step_that_schedules_nothing_changes_nothing() -> None:
    engine = Engine("quest:budget=16,rectify=4")
    request = engine.add("a", prompt(7), 40)
    while request.num_computed_tokens < 11:
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step()
    assert request.num_computed_tokens == 11
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.finish()
    assert decoding(engine, "a", 7) == phase(7, 40, 4)


def test_siblings_of_one_prompt() -> None:
    """What `n=3` makes of a request."""
    engine = Engine("quest:budget=16,rectify=4")
    for index in range(3):
        engine.add(str(index), prompt(21), 30 + index)
    engine.finish()
    for index in range(3):
        assert decoding(engine, str(index), 21) == phase(21, 30 + index, 4)
    assert engine.worker.found["1"] == 20


@pytest.mark.parametrize("length", range(20, 26))
def test_up_to_the_longest_row(length: int) -> None:
    engine = Engine("quest:budget=16,rectify=4", max_model_len=40)
    request = engine.add("a", prompt(length), 100)
    engine.finish()
    assert request.num_tokens == 40
    assert decoding(engine, "a", length) == phase(length, 40 - length, 4)


@pytest.mark.parametrize("covered", [0, 24, 512])
def test_streaming_input_takes_unclean_tokens_with_it(covered: int) -> None:
    """The next input of a session is dense, and the blocks behind the last answer's clean ones stay unpublished."""
    engine = Engine("quest:budget=16,rectify=5", covered=covered)
    first = engine.add("a", prompt(13), 9, resumable=True)
    for _ in range(12):
        engine.step()
    assert first.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    engine.add("a", prompt(10, 700), 20, resumable=True)
    engine.step()
    assert all(engine.worker.clean("a"))
    start, count = engine.worker.steps["a"][-1]
    assert (start, start + count) == (19 if covered < 21 else 21, 31)
    while first.status == RequestStatus.RUNNING:
        engine.step()
    assert decoding(engine, "a", 31) == phase(31, 20, 5, covered)
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    engine.finish()


def test_a_session_may_opt_out_and_in_again() -> None:
    engine = Engine("quest:budget=16,rectify=5")
    session = engine.add("a", prompt(13), 9, resumable=True)
    for settings in ({"extra_args": OFF}, {}):
        engine.step()
        while session.status == RequestStatus.RUNNING:
            engine.step()
        engine.add("a", prompt(10, 700), 9, params=settings, resumable=True)
        dense = session.sampling_params.extra_args == OFF
        engine.step()
        while session.status == RequestStatus.RUNNING:
            assert all(engine.worker.clean("a")) or not dense
            engine.step()
    assert decoding(engine, "a", 13)[:9] == [*phase(13, 9, 5), (19, 12)]
    assert decoding(engine, "a", 31)[:9] == [*phase(31, 9, 99), (39, 10)]
    assert decoding(engine, "a", 49) == phase(49, 9, 5)
    engine.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    engine.finish()


def test_model_runner_v2_is_sent_passes_as_new_requests() -> None:
    """Its whole output for such a step; that a GPU then does the same has not been seen here."""
    engine = Engine("quest:budget=16,rectify=4", v2=True)
    request = engine.add("a", prompt(7), 40)
    engine.add("b", prompt(6, 900), 40, params={"extra_args": OFF})
    while request.num_computed_tokens < 11:
        engine.step()
    everything, held = list(request.all_token_ids), engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
    output = engine.step()
    (sent,) = output.scheduled_new_reqs
    assert (sent.req_id, sent.num_computed_tokens, output.num_scheduled_tokens["a"]) == ("a", 7, 5)
    assert sent.prefill_token_ids == everything
    assert sent.prompt_token_ids == prompt(7)
    assert sent.block_ids == engine.scheduler.kv_cache_manager.get_block_ids("a")
    assert sent.block_ids[0][: len(held)] == held
    assert sent.sampling_params is request.sampling_params
    cached = output.scheduled_cached_reqs
    assert cached.req_ids == ["b"]
    assert [len(part) for part in (cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens)] == [
        1
    ] * 3
    assert not output.preempted_req_ids
    assert not output.finished_req_ids


def test_counters_are_observed() -> None:
    counted: dict[str, int] = defaultdict(int)

    class Watched(RectifyingScheduler):
        def observe(self, name: str, amount: int) -> None:
            counted[name] += amount

    engine = Engine("quest:budget=16,rectify=5", blocks=30, scheduler_cls=Watched)
    for index in range(4):
        engine.add(str(index), prompt(9, 50 * index), 40)
    engine.finish()
    assert min(counted.values()) > 0
    assert counted == {name: getattr(engine.scheduler, name) for name in counted}
    assert set(counted) == {"rectifications", "rectified_tokens", "preemptions"}


def test_without_rectification_it_is_the_stock_scheduler() -> None:
    engine = Engine("quest:budget=16")
    engine.add("a", prompt(9), 40)
    engine.finish()
    assert decoding(engine, "a", 9) == [(9 + index, 1) for index in range(39)]


def refusals() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "quest:budget=16,rectify=4:verify", {}, "rectify=4:verify"
    yield "quest:budget=16,rectify=64", {}, "--max-num-batched-tokens 64 cannot hold a dense pass of 65 tokens"
    yield "quest:budget=16,rectify=4", {"long_prefill_token_threshold": 4}, "--long-prefill-token-threshold 4"
    yield "quest:budget=16", {"additional_config": {}}, "--additional-config"


@pytest.mark.parametrize(("policy", "settings", "reason"), list(refusals()))
def test_refusals(policy: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ServingError, match=reason) as refused:
        Engine(policy, **settings)
    assert "\n" not in str(refused.value)


def test_what_hand_made_settings_lack_is_named() -> None:
    stock = config("quest:budget=16,rectify=4", scheduler_cls=None)
    stock.scheduler_config.async_scheduling = True  # as on CUDA; the CPU platform switches it off
    first, second = reasons_against_rectifying(stock, Rectify(4))
    assert f"--scheduler-cls {SCHEDULER}" in first
    assert "--no-async-scheduling" in second


def test_attention_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    monkeypatch.setattr(SaccadeAttentionSpec, "of", lambda *given, **named: plain)
    with pytest.raises(ServingError, match="--attention-backend CUSTOM"):
        Engine("quest:budget=16,rectify=4")


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_anything_at_any_time(seed: int, v2: bool) -> None:
    """Random requests, sharing prefixes, that come, opt out and are aborted whenever; few blocks, few tokens a step."""
    chance = random.Random(seed)
    every = chance.choice([1, 3, 7])
    engine = Engine(
        f"quest:budget=16,rectify={every}",
        blocks=chance.choice([40, 60, 400]),
        covered=chance.choice([0, 20, 35]),
        max_num_batched_tokens=chance.choice([8, 12, 24, 64]),
        scheduling_policy=chance.choice(["fcfs", "priority"]),
        v2=v2,
    )
    lengths, ended = {}, []
    for index in range(40):
        for _ in range(chance.randrange(12)):
            engine.step()
        if ended and chance.random() < 0.3:
            text = [*chance.choice(ended).all_token_ids, index]
        else:
            text = prompt(chance.randrange(1, 50), 50 * chance.randrange(3))
        name, out = str(index), chance.random() < 0.2
        text = text[:80]
        lengths[name] = len(text)
        params = {"extra_args": OFF} if out else {}
        request = engine.add(name, text, chance.randrange(1, 40), params=params, priority=chance.randrange(3))
        if chance.random() < 0.15:
            victim = chance.choice(list(engine.scheduler.requests))
            engine.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
        ended += [request] if request.is_finished() else []
        ended = [request for request in engine.requests.values() if request.is_finished()]
    engine.finish()
    whole = 0
    for name, request in engine.requests.items():
        if request.num_preemptions or not engine.worker.steps[name]:
            continue
        steps = decoding(engine, name, lengths[name])
        dense = request.sampling_params.extra_args == OFF
        count = len(steps) + 1
        assert steps == phase(lengths[name], count, 10**9 if dense else every, engine.worker.covered)
        whole += 1
    assert whole > 5
