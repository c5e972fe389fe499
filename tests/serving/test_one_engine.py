"""One engine in two runtimes: below the budget each request's tokens are those of the transformers adapter.

Also by indexes that are not ours. After a dense pass the cache holds what a dense prefill of the same tokens writes.
Requests that opt out, end early, lose their cache or take another turn are answered as in stock vLLM, or as alone.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engines import (
    Answer,
    Engines,
    answer_of,
    answers,
    by_transformers,
    core,
    force_own_path,
    greedy,
    prompt_of,
    prompts,
    runner,
)
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt

from conftest import VISIT
from own_index import BUDGET, MODULE, NAMES
from own_method import installed
from saccade.adapters.vllm.server.serve import RefusedError, prepare
from saccade.adapters.vllm.worker.requests import requests_of
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.checkpoints.bundled import model_path
from saccade.selection.scorers.exact import ExactScorer
from walking import among, walk

POLICIES = (
    "streaming:budget=64,rectify=4",
    "quest:budget=64,rectify=8",
    "quest:budget=64,page=32,heads=query,min_pages=3,keep_last=false",
    "lychee_cluster:budget=96,buffer=16",
    "resa:min_pages=2,ratio=0.05,rectify=16",
    "resa:min_pages=2,ratio=0.05,rectify=none",
    "tidal:budget=64,reselect=7",
    "tidal:budget=64,reselect=7,heads=query,rectify=8",
    "tidal:rule=top_p,top_p=0.9,budget=256,reselect=7,sinks=4,window=32",
    "less_is_more:budget=64,reselect=7",
    "less_is_more:budget=64,reselect=7,rectify=5",
    "lychee_decode:budget=64,roles=every:4,rectify=8",
    "lychee_decode:rule=threshold,threshold=0.002,roles=layers:0+2+7",
    "lychee_cluster:budget=64,rectify=8",
    "token_clusters:budget=96,group=256",
    "token_clusters:budget=96,rectify=8,heads=query",
    "exact_topk:budget=48,rectify=5",
    "composed:scorer=page_bounds,budget=64,pooling=mass,dense_layers=2",
)
WALKED = (3, 5, 6, 7, 9, 15, 17)
EVERY_TIME = tuple(policy for place, policy in enumerate(POLICIES) if place not in WALKED)
"""By kind: a window, bounds of pages, a published set with every rule, a union, an index of its own; most rectified."""
LENGTHS, STEPS = (400, 130, 64, 780), 20


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()


def expected_of(policy: str, asked: list[list[int]], steps: int = STEPS) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in by_transformers(model(), policy, asked, steps)]


@pytest.mark.parametrize("policy", among(POLICIES, EVERY_TIME))
def test_tokens_are_those_of_the_transformers_adapter(policy: str, visited: LLM) -> None:
    """Alone and inside a mixed batch of 4, whose prompts are prefilled in chunks while others decode."""
    asked = prompts(*LENGTHS)
    expected = expected_of(policy, asked)
    assert answers(visited, asked[:1], greedy(STEPS))[0].tokens == expected[0]
    assert [answer.tokens for answer in answers(visited, asked, greedy(STEPS))] == expected


@pytest.mark.parametrize("policy", ["quest:budget=96,rectify=8", "lychee_cluster:budget=96,rectify=8"])
def test_rows_that_steps_have_no_room_for_lose_nothing(policy: str, engines: Engines) -> None:
    """Fourteen tokens a step for dense passes of nine: requests wait, leave the batch and come back."""
    asked = prompts(130, 157, 91, 140, 64, 120, 110, 99)
    expected = expected_of(policy, asked, 20)
    engine = engines.sparse(policy, max_num_batched_tokens=14)
    scheduler, held = core(engine).scheduler, list[int]()
    schedule = scheduler.schedule
    scheduler.schedule = lambda *rest: (held.append(len(scheduler._held)), schedule(*rest))[1]
    assert [answer.tokens for answer in answers(engine, asked, greedy(20))] == expected
    assert any(held), "every pass had room: this shows nothing about waiting"


REWRITTEN = tuple(POLICIES[place] for place in (0, 1, 4, 7, 10, 11, 13))
CACHED = (300, 87, 210)


def keys_and_values(engine: LLM, request: Any, slots: int) -> Tensor:
    """What the cache holds for the first `slots` slots of a running request, `[L, 2, slots, Hkv, d]`."""
    blocks = core(engine).scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    layers = []
    for paged in runner(engine).kv_caches:
        held = paged[blocks]
        count, heads, block, width = held.shape
        halves = held.reshape(count, heads, 2, block * width // 2)
        k = halves[:, :, 0].view(count, heads, width // 2, block).permute(0, 3, 1, 2)
        v = halves[:, :, 1].view(count, heads, block, width // 2).permute(0, 2, 1, 3)
        layers.append(torch.stack([part.reshape(count * block, heads, width // 2)[:slots] for part in (k, v)]))
    return torch.stack(layers)


def running(engine: LLM, name: str) -> Any:
    return next(one for key, one in core(engine).scheduler.requests.items() if key.startswith(name))


@pytest.mark.parametrize("policy", among(REWRITTEN, (*REWRITTEN[:3], *REWRITTEN[5:])))
def test_the_cache_is_that_of_a_dense_prefill(policy: str, visited: LLM) -> None:
    """Three requests in one batch; all layers; float32, 1e-5. Between two passes the cache is another one."""
    every = int(policy.rpartition("rectify=")[2])
    inner = visited.llm_engine
    for number, prompt in enumerate(prompts(*CACHED)):
        inner.add_request(str(number), prompt_of(prompt), greedy(90))
    seen: list[tuple[list[int], int, Tensor]] = []
    for step in range(46):
        inner.step()
        if step < 20 or step % 9:
            continue
        for number, length in enumerate(CACHED):
            request = running(visited, str(number))
            held = request.num_computed_tokens
            clean = length + (held - length) // (every + 1) * (every + 1)
            seen.append((list(request.all_token_ids)[:held], clean, keys_and_values(visited, request, held)))
    inner.abort_request(map(str, range(len(CACHED))))
    differing = 0
    for place, (tokens, clean, written) in enumerate(seen):
        inner.add_request(f"dense {place}", prompt_of(tokens), greedy(9))
        inner.step()
        expected = keys_and_values(visited, running(visited, f"dense {place}"), len(tokens))
        inner.abort_request([f"dense {place}"])
        torch.testing.assert_close(written[:, :, :clean], expected[:, :, :clean], atol=1e-5, rtol=1e-5)
        beyond = (written[:, :, clean:] - expected[:, :, clean:]).abs().amax() if clean < len(tokens) else 0
        differing += bool(beyond > 1e-3)
    assert differing, "sparse steps wrote what dense ones write: this shows nothing about the passes"


@pytest.mark.parametrize(
    ("policy", "page", "block"),
    [
        (REWRITTEN[1], 16, 32),
        pytest.param("quest:budget=64,page=16,rectify=6", 16, 16, marks=walk),
        pytest.param("quest:budget=64,page=32,rectify=6", 32, 64, marks=walk),
    ],
)
def test_page_bounds_are_those_of_the_keys(policy: str, page: int, block: int, all_engines: Engines) -> None:
    """After prefill in chunks, decoding and rectification, of the full pages of running requests; exactly."""
    engine = all_engines.visit(policy, **VISIT, **({} if block == 32 else {"block_size": block}))
    inner = engine.llm_engine
    for number, prompt in enumerate([*prompts(*CACHED), *prompts(*CACHED)]):
        inner.add_request(str(number), prompt_of(prompt), greedy(90))
    for _ in range(45):
        inner.step()
    attention = next(iter(runner(engine).compilation_config.static_forward_context.values())).impl
    bounds = attention.serving.indexes.layers
    assert sorted(bounds) == list(range(2, 12)), "dense layers keep no bounds"
    for number in range(2 * len(CACHED)):
        request = running(engine, str(number))
        length = request.num_computed_tokens
        keys = keys_and_values(engine, request, length)[:, 0]
        blocks = core(engine).scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        for layer, held in bounds.items():
            for place in range(length // page):
                tokens = keys[layer, place * page : (place + 1) * page]
                at = blocks[place * page // block], slice(None), place * page % block // page
                assert torch.equal(held.lower[at], tokens.amin(0)), (layer, place)
                assert torch.equal(held.upper[at], tokens.amax(0)), (layer, place)
    inner.abort_request(map(str, range(2 * len(CACHED))))


@pytest.mark.parametrize(("name", "rectify"), zip(NAMES, ["", ",rectify=6"], strict=True))
def test_an_index_found_by_its_entry_point_serves_too(
    name: str, rectify: str, tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a mixed batch of prompts in chunks, in so little room that requests are preempted, and in a second turn."""
    spec, asked = f"{name}:budget={BUDGET}{rectify}", prompts(250, 251, 252, 249, 64)
    with installed(tmp_path, MODULE, POSITIVE=NAMES[0], STOPS=NAMES[1]):
        engine = engines.sparse(
            spec, enable_prefix_caching=True, max_num_batched_tokens=96, num_gpu_blocks_override=33, max_model_len=1024
        )
        scheduler = core(engine).scheduler
        preempt = Mock(wraps=scheduler._preempt_request)
        monkeypatch.setattr(scheduler, "_preempt_request", preempt)
        expected = expected_of(spec, asked)
        assert [answer.tokens for answer in answers(engine, asked, greedy(STEPS))] == expected
        turn = [*asked[0], *expected[0], *asked[1][:40]]
        assert answers(engine, [turn], greedy(STEPS))[0].tokens == expected_of(spec, [turn])[0]
        assert preempt.called


def test_an_index_of_pages_that_is_no_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's pages have room for bounds alone, so that nobody would ever make or update it."""
    monkeypatch.setattr(ExactScorer, "new_index", lambda self, kv: object())
    with pytest.raises(RefusedError, match="exact_topk:budget=64 keeps something of pages other than bounds"):
        prepare([], policy="exact_topk:budget=64")


OFF = {"saccade": "off"}
SPARSE = (
    "quest:budget=64",
    "quest:budget=64,rectify=8",
    "tidal:budget=64,reselect=7",
    "lychee_cluster:budget=64,rectify=8",
)
PREEMPTED = SPARSE[1::2]
LONGEST = 336
WAYS: dict[str, dict[str, Any]] = {
    "three answers": {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 16},
    "seed": {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 24},
    "penalties": {
        **{"temperature": 0, "max_tokens": 24, "presence_penalty": 0.7},
        **{"frequency_penalty": 0.4, "repetition_penalty": 1.2},
    },
    "log-probabilities": {"temperature": 0, "max_tokens": 8, "logprobs": 5, "prompt_logprobs": 2},
    "stop string": {"temperature": 0, "max_tokens": 64, "stop": ["e"], "ignore_eos": True},
    "fewest tokens": {"temperature": 0, "max_tokens": 20, "min_tokens": 12, "logit_bias": {0: 5.0}},
    "forbidden words": {"temperature": 0, "max_tokens": 16, "bad_words": ["the", " a"]},
}


def sampled(engine: LLM) -> dict[str, list[Any]]:
    """In every way all completions of each prompt, and why they ended."""
    found = dict[str, list[Any]]()
    for name, settings in WAYS.items():
        asked = [prompt_of(ids) for ids in prompts(90, 33, 150)]
        outputs = engine.generate(asked, SamplingParams(**settings), use_tqdm=False)
        parts = [part for output in outputs for part in output.outputs]
        found[name] = [(part.token_ids, part.text, part.finish_reason, part.stop_reason) for part in parts]
    return found


def chances(engine: LLM) -> list[list[float]]:
    params, asked = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1), prompts(70, 41)
    outputs = engine.generate([prompt_of(ids) for ids in asked], params, use_tqdm=False)
    return [
        [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        for output, ids in zip(outputs, asked, strict=True)
    ]


def dense(engine: LLM, **settings: Any) -> list[Answer]:
    return answers(engine, prompts(300, 17, 129, 64), greedy(24, **settings))


def at_the_maximum(engine: LLM) -> tuple[list[str], Answer]:
    """A prompt that is too long, an empty one, and a request that would outgrow the maximum and ends there."""
    told = list[str]()
    for asked in (prompts(400), [[]]):
        with pytest.raises(VLLMValidationError) as caught:
            answers(engine, asked, greedy(4))
        told.append(str(caught.value))
    return told, answers(engine, prompts(LONGEST - 16), greedy(64))[0]


def questions(engine: LLM) -> tuple[dict[str, Any], list[list[float]], list[Answer], tuple[list[str], Answer]]:
    return sampled(engine), chances(engine), dense(engine), at_the_maximum(engine)


def test_every_way_of_sampling_gives_what_stock_gives(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a budget that covers the context, through our own path."""
    expected = engines.by_stock(questions, max_model_len=LONGEST)[0]
    force_own_path(monkeypatch)
    assert sampled(engines.sparse("quest:budget=4096,rectify=6", max_model_len=LONGEST)) == expected


def test_what_stock_answers_without_a_policy_is_what_it_answers_here(engines: Engines) -> None:
    """Log-probabilities of prompts; a request that opts out, bit by bit where it is alone, its tokens beside others."""
    _, prompted, expected, _ = engines.by_stock(questions, max_model_len=LONGEST)
    engine = engines.sparse("streaming:budget=8", max_model_len=LONGEST)
    for ours, theirs in zip(chances(engine), prompted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert dense(engine, extra_args=OFF) == expected
    sparse = [answer.tokens for answer in dense(engine)]
    some = [greedy(24, extra_args=OFF), greedy(24)] * 2
    mixed = answers(engine, prompts(300, 17, 129, 64), some)
    alone = [answer.tokens for answer in expected]
    assert [answer.tokens for answer in mixed] == [alone[0], sparse[1], alone[2], sparse[3]]
    assert sparse[0] != alone[0], "eight tokens of attention change nothing: the policy does not run"


@pytest.mark.parametrize("policy", among(SPARSE, SPARSE[1:]))
def test_answers_do_not_depend_on_neighbours(policy: str, visited: LLM) -> None:
    """Several answers per prompt, each of its own seed, alone and in one batch.

    Prompts come in one chunk: stock vLLM 0.32 crashes on a CPU where a request with a seed is prefilled in several.
    """

    def ask(places: Sequence[int]) -> list[Any]:
        # Of two answers the second finds the first's blocks, in the step in which these are computed.
        params = [SamplingParams(temperature=1.0, n=2, max_tokens=20, ignore_eos=True, seed=1 + one) for one in places]
        asked = [prompt_of(prompts(100, 70, 80)[one]) for one in places]
        found = visited.generate(asked, params, use_tqdm=False)
        return [[part.token_ids for part in output.outputs] for output in found]

    assert ask(range(3)) == [*ask([0]), *ask([1]), *ask([2])]


@pytest.mark.parametrize("policy", among(SPARSE, SPARSE[1:]))
def test_requests_that_are_aborted_leave_nothing_behind(policy: str, visited: LLM) -> None:
    """Two of four are aborted midway; the others' answers are those they give alone, and all blocks come back."""
    asked = prompts(210, 90, 333, 120)
    alone = {str(place): answers(visited, [asked[place]], greedy(30))[0].tokens for place in (1, 2)}
    inner = visited.llm_engine
    for number, prompt in enumerate(asked):
        inner.add_request(str(number), prompt_of(prompt), greedy(30))
    finished, step, scheduler = dict[str, tuple[int, ...]](), 0, core(visited).scheduler
    while inner.has_unfinished_requests() and step < 200:
        finished |= {one.request_id: tuple(one.outputs[0].token_ids) for one in inner.step() if one.finished}
        inner.abort_request({9: ["0"], 17: ["3"]}.get(step, []))
        step += 1
    assert {name: finished[name] for name in alone} == alone
    assert not scheduler.requests and not scheduler.running and scheduler.kv_cache_manager.usage == 0
    # One more batch, after which the worker has heard of all that ended: it remembers none of them.
    answers(visited, prompts(20), greedy(2))
    answers(visited, prompts(20), greedy(2))
    rows = requests_of(runner(visited).vllm_config)
    assert rows is not None and len(rows.rows) + len(rows._away) <= 1


@pytest.mark.parametrize("policy", among(SPARSE, PREEMPTED), ids=lambda policy: policy.partition(":")[0])
def test_preempted_requests_finish_and_are_counted(policy: str, engines: Engines) -> None:
    """A cache too small for all: some lose their blocks and are computed anew. Too long: as in stock vLLM."""
    refused, ended = engines.by_stock(questions, max_model_len=LONGEST)[-1]
    engine = engines.sparse(policy, num_gpu_blocks_override=20, max_model_len=LONGEST)
    scheduler = core(engine).scheduler
    scheduler._preempt_request = preempt = Mock(wraps=scheduler._preempt_request)
    asked = prompts(170, 170, 170)
    found = answers(engine, asked, greedy(50))
    assert [len(answer.tokens) for answer in found] == [50] * 3
    preempted = [call.args[0].request_id for call in preempt.call_args_list]
    assert preempted, "nobody was preempted: the cache is too large for this test"
    survivors = [number for number in range(3) if not any(name.startswith(str(number)) for name in preempted)]
    assert survivors, "everybody was preempted: nobody is left to compare"
    for number in survivors:
        assert found[number].tokens == answers(engine, [asked[number]], greedy(50))[0].tokens
    told, last = at_the_maximum(engine)
    assert (told, last.reason, ended.reason) == (refused, "length", "length")
    assert len(last.tokens) == len(ended.tokens) == 16


@pytest.mark.parametrize("policy", SPARSE[1:2])
def test_a_copy_of_the_configuration_is_of_the_same_engine(policy: str, visited: LLM) -> None:
    """As vLLM makes one for the decoder of a model that reads images, whose layers then ask with it."""
    config = runner(visited).vllm_config
    copied = config.with_hf_config(config.model_config.hf_config)
    assert copied is not config
    assert serving_of(copied) is serving_of(config)
    assert requests_of(copied) is requests_of(config) is not None


SHARED = (*SPARSE[:2], "resa:min_pages=2,ratio=0.05,rectify=16", SPARSE[2], "lychee_cluster:budget=64", SPARSE[3])


@pytest.mark.parametrize("policy", among(SHARED, SHARED[1:]))
def test_a_second_turn_is_what_it_is_without_the_cache(policy: str, visited: LLM) -> None:
    """Three turns, each of which begins with the one before, its sparse answer included; and one behind a dense one."""
    every = 8 if "rectify=8" in policy else 16 if "rectify=16" in policy else None
    prompt, steps, last = prompts(333)[0], 26, 0
    for turn in range(4):
        shared = TokensPrompt(prompt_token_ids=prompt, cache_salt="second turn")
        # The third answer opts out, which the fourth turn finds whole, with the bounds of pages that it has filled.
        params = greedy(steps, extra_args={"saccade": "off"} if turn == 2 else None)
        # Beside each other: a step of two rows takes what a step of one does.
        output, alone = visited.generate([shared, prompt_of(prompt)], params, use_tqdm=False)
        expected = answer_of(alone.outputs[0])
        assert answer_of(output.outputs[0]).tokens == expected.tokens
        if turn:
            # Of the last turn: its prompt, and with rectification every whole phase of every + 1 tokens after it.
            rewritten = 0 if every is None else (steps - 1) // (every + 1) * (every + 1)
            clean = last + (steps - 1 if turn == 3 else rewritten)
            assert output.num_cached_tokens == clean // 32 * 32
        last = len(prompt)
        prompt = [*prompt, *expected.tokens, *prompts(40, start=5000 + 100 * turn)[0]]
