"""Requests that come, lose their slots, are taken up again and go, under the scheduler of dense passes; refusals."""

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from scheduled import BLOCK, HOWS, OFF, Engine, config, decoding, passes, phase, prompt
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState

from saccade import ServingError
from saccade.adapters.vllm import checks
from saccade.adapters.vllm.cache_spec import SaccadeAttentionSpec
from saccade.adapters.vllm.checks import reasons_against_rectifying
from saccade.adapters.vllm.options import ServeOptions
from saccade.adapters.vllm.scheduler import RectifyingScheduler, rectifying
from saccade.adapters.vllm.scheduler.held import HeldTokens
from saccade.adapters.vllm.scheduler.rectifying import AheadScheduler
from saccade.plans.rectify import Rectify
from walking import in_turn

STOCK = {"scheduler_cls": None}


def found(policy: str, covered: int, first: int, tokens: int, params: Any = None, **how: Any) -> int:
    """How many tokens of the first turn the second finds in the prefix cache."""
    engine = Engine(policy, covered=covered, **how)
    request = engine.add("first", prompt(first), tokens, params=params or {})
    engine.finish()
    engine.add("second", [*request.all_token_ids, 7, 8, 9], 5)
    engine.finish()
    return engine.worker.found["second"]


@pytest.mark.parametrize(
    ("first", "tokens", "how"),
    [(9, 1, {}), (10, 31, STOCK), (12, 32, {**STOCK, "v2": True}), (16, 16, {**STOCK, "v2": True, "ahead": True})],
)
def test_a_second_turn_finds_what_is_clean(first: int, tokens: int, how: dict[str, Any]) -> None:
    """The worker checks every slot that a request is given; here: that it is given all of them.

    Without rectification any scheduler serves; dense requests leave what they leave in stock vLLM.
    """
    last, asked = first + tokens - 1, (first, tokens)
    assert found("quest:budget=16", 0, *asked, **how) == first // BLOCK * BLOCK
    for covered in (15, 16):
        assert found("quest:budget=16", covered, *asked, **how) == min(max(first, covered), last) // BLOCK * BLOCK
    assert found("dense", 512, *asked, **how) == last // BLOCK * BLOCK
    assert found("quest:budget=16", 0, *asked, {"extra_args": OFF}, **how) == last // BLOCK * BLOCK


@pytest.mark.parametrize(("first", "tokens"), [(9, 20), (10, 31), (15, 33)])
def test_a_second_turn_finds_what_passes_have_left(first: int, tokens: int) -> None:
    clean = first + (tokens - 1) // 6 * 6
    for covered in (0, 17, 512):
        assert found("quest:budget=16,rectify=5", covered, first, tokens) == clean // BLOCK * BLOCK


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
    before, counted = len(engine.worker.steps["a"]), engine.scheduler.rectifications
    while request.num_computed_tokens < 28:
        engine.step()
    singles = [start for start, count in engine.worker.steps["a"][before:] if count == 1]
    assert singles.count(9) > 1 and engine.scheduler.rectifications == counted
    assert all(engine.worker.clean("a")[:28]), "all but the last token, which may have been left alone"
    engine.finish()


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


@pytest.mark.parametrize("covered", [0, 21])
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


def test_counters_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[str, int] = defaultdict(int)

    def count(name: str, amount: int) -> None:
        counted[name] += amount

    monkeypatch.setattr(rectifying.metrics, "count", count)
    engine = Engine("quest:budget=16,rectify=5", blocks=30)
    for index in range(4):
        engine.add(str(index), prompt(9, 50 * index), 40)
    engine.finish()
    assert min(counted.values()) > 0
    assert counted == {name: getattr(engine.scheduler, name) for name in counted}
    assert set(counted) == {"rectifications", "rectified_tokens", "preemptions"}


def refusals() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "quest:budget=16,rectify=4:verify", {}, "rectify=4:verify"
    yield "quest:budget=16,rectify=64", {}, "--max-num-batched-tokens 64 cannot hold a dense pass of 65 tokens"
    yield "quest:budget=16,rectify=4", {"long_prefill_token_threshold": 4}, "--long-prefill-token-threshold 4"
    yield "quest:budget=16,rectify=4", {"max_num_scheduled_tokens": 4}, "max_num_scheduled_tokens=4 cannot hold"
    yield "quest:budget=16", {"additional_config": {}}, "--additional-config"


@pytest.mark.parametrize(("policy", "settings", "reason"), list(refusals()))
def test_refusals(policy: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ServingError, match=reason) as refused:
        Engine(policy, **settings)
    assert "\n" not in str(refused.value)


def test_only_model_runner_v2_has_tokens_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step that is scheduled ahead reads must lie on the device when it runs; M-RoPE wants it on the host."""
    asked = config("quest:budget=16,rectify=4")
    asked.scheduler_config.async_scheduling = True
    for v2, refused in (("0", True), ("1", False)):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
        assert any("--no-async-scheduling" in one for one in reasons_against_rectifying(asked, Rectify(4))) is refused
    monkeypatch.setattr(type(asked.model_config), "uses_mrope", True)
    assert any("--no-async-scheduling" in one for one in reasons_against_rectifying(asked, Rectify(4)))


def test_on_model_runner_v2_a_pass_would_lose_an_index_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("lychee_cluster:budget=96,rectify=4")
    for v2, refused in (("1", True), ("0", False)):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", v2)
        reasons = checks.reasons_against(asked, ServeOptions.of(asked))
        assert any("whose index is lost" in one for one in reasons) is refused


def test_models_and_ranks_that_no_policy_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what vLLM says of them: no small model and no single process has it."""
    asked, policy = config("quest:budget=16"), ServeOptions.of(config("quest:budget=16"))
    for part, name, value, words in (
        (asked.model_config, "use_mla", True, "multi-head latent attention"),
        (asked.model_config, "is_encoder_decoder", True, "only text decoders that generate"),
        (asked.model_config, "runner_type", "pooling", "only text decoders that generate"),
        (asked.model_config, "is_hybrid", True, "does not say which of its layers have full attention"),
        (asked.parallel_config, "decode_context_parallel_size", 2, "context parallelism"),
        (asked.parallel_config, "prefill_context_parallel_size", 2, "context parallelism"),
        (asked.parallel_config, "use_ubatching", True, "micro-batches"),
        (asked.parallel_config, "tensor_parallel_size", 5, "KV heads unevenly"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(type(part), name, property(lambda _, value=value: value), raising=False)
            assert any(words in one for one in checks.reasons_against(asked, policy)), name


def test_a_scheduler_of_ones_own_is_not_made_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(RectifyingScheduler):
        pass

    class Ahead(AheadScheduler):
        pass

    for scheduler, refused in ((Mine, ["Mine schedules synchronously"]), (Ahead, []), (RectifyingScheduler, [])):
        asked = config("quest:budget=16,rectify=4", scheduler_cls=scheduler)
        asked.scheduler_config.async_scheduling = True
        monkeypatch.setattr(checks, "rectifies_ahead", lambda config: True)
        found = reasons_against_rectifying(asked, Rectify(4))
        assert [any(words in one for one in found) for words in refused] == [True] * len(refused) == [True] * len(found)


def test_model_runner_v2_gives_a_request_its_slot_back() -> None:
    """What `HeldTokens` stands on, in vLLM's own record: the slot is the same, and one token is written into it."""
    state, ids = RequestState.__new__(RequestState), StagedWriteTensor.__new__(StagedWriteTensor)
    for part in ("indices", "starts", "contents", "cu_lens"):
        setattr(ids, f"_staged_write_{part}", [])
    ids._staged_write_max_len = state.num_speculative_steps = 0  # of vLLM 0.33
    fields = ("max_seq_len", "prompt_len", "prefill_len", "total_len", "num_computed_prefill_tokens", "draft_tokens")
    names = {"a": 0, "b": 1, "c": 2}
    vars(state).update({name: MagicMock() for name in (*fields, "num_computed_tokens_np", "num_computed_tokens")})
    vars(state).update(free_indices=[3], req_id_to_index=dict(names), all_token_ids=ids)
    state.index_to_req_id = {index: name for name, index in names.items()}
    state.remove_request("a")
    for name, length in (("b", 5), ("c", 9)):
        state.remove_request(name)
        state.add_request(name, 4, HeldTokens(7, length), 3, 20)
        assert state.req_id_to_index[name] == names[name]
        state.prefill_len.np.__setitem__.assert_called_with(names[name], length)
    assert ids._staged_write_contents == [7, 7] and ids._staged_write_indices == [1, 2]


def test_attention_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    monkeypatch.setattr(SaccadeAttentionSpec, "of", lambda *given, **named: plain)
    with pytest.raises(ServingError, match="--attention-backend CUSTOM"):
        Engine("quest:budget=16,rectify=4")


@pytest.mark.parametrize(("seed", "settled"), in_turn(range(12), product(HOWS, (False, True))))
def test_anything_at_any_time(seed: int, settled: tuple[dict[str, bool], bool]) -> None:
    """Random requests, sharing prefixes, that come, opt out and are aborted whenever; few blocks, few tokens a step."""
    chance, (how, together) = random.Random(seed), settled
    every = chance.choice([1, 3, 7])
    policy = f"quest:budget=16,rectify={every}"
    engine = Engine(
        policy,
        additional_config={"saccade": {"policy": policy, "rectify_together": together}},
        blocks=chance.choice([40, 60, 400]),
        covered=chance.choice([0, 20, 35]),
        max_num_batched_tokens=chance.choice([8, 12, 24, 64]),
        scheduling_policy=chance.choice(["fcfs", "priority"]),
        **how,
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
        whole += 1
        if together:
            # Of covered rows no pass says how far they are clean.
            assert engine.worker.covered or max(passes(steps, lengths[name]), default=0) <= every
            continue
        assert steps == phase(lengths[name], count, 10**9 if dense else every, engine.worker.covered)
    assert whole > 5


def test_model_runner_v2_is_sent_passes_as_new_requests() -> None:
    """Its whole output for such a step. Of its tokens only how many they are: it holds them."""
    engine = Engine("quest:budget=16,rectify=4", v2=True)
    request = engine.add("a", prompt(7), 40)
    engine.add("b", prompt(6, 900), 40, params={"extra_args": OFF})
    while request.num_computed_tokens < 11:
        engine.step()
    length, output = request.num_tokens, engine.step()
    (sent,) = output.scheduled_new_reqs
    assert (sent.req_id, sent.num_computed_tokens, output.num_scheduled_tokens["a"]) == ("a", 7, 5)
    assert (len(sent.prefill_token_ids), list(sent.prefill_token_ids)) == (length, [100])
    with pytest.raises(IndexError):
        sent.prefill_token_ids[1]
    assert sent.prompt_token_ids == prompt(7) and sent.sampling_params is request.sampling_params
    cached = output.scheduled_cached_reqs
    assert cached.req_ids == ["b"] and len(cached.num_output_tokens) == 1
    assert not output.preempted_req_ids and not output.finished_req_ids
