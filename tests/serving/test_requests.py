"""What users ask of a server besides tokens: the same behaviour as stock vLLM, or a clear refusal."""

from collections.abc import Callable
from typing import Any

import pytest
from engines import Answer, Engines, answer_of, answers, core, force_own_path, greedy, prompt_of, prompts, runner
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt

from saccade.adapters.vllm.worker.requests import requests_of
from saccade.adapters.vllm.worker.worker import serving_of
from walking import among

COVERED = "quest:budget=4096,rectify=6"
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
        "temperature": 0,
        "max_tokens": 24,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "log-probabilities": {"temperature": 0, "max_tokens": 8, "logprobs": 5, "prompt_logprobs": 2},
    "stop string": {"temperature": 0, "max_tokens": 64, "stop": ["e"], "ignore_eos": True},
    "fewest tokens": {"temperature": 0, "max_tokens": 20, "min_tokens": 12, "logit_bias": {0: 5.0}},
    "forbidden words": {"temperature": 0, "max_tokens": 16, "bad_words": ["the", " a"]},
}


def full(engine: LLM, asked: list[list[int]], params: SamplingParams) -> list[Any]:
    outputs = engine.generate([prompt_of(ids) for ids in asked], params, use_tqdm=False)
    return [
        [(tuple(part.token_ids), part.text, part.finish_reason, part.stop_reason) for part in output.outputs]
        for output in outputs
    ]


def sampled(engine: LLM) -> dict[str, Any]:
    return {name: full(engine, prompts(90, 33, 150), SamplingParams(**settings)) for name, settings in WAYS.items()}


def chances(engine: LLM) -> list[list[float]]:
    """Of prompts' tokens."""
    params, asked = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1), prompts(70, 41)
    outputs = engine.generate([prompt_of(ids) for ids in asked], params, use_tqdm=False)
    return [
        [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        for output, ids in zip(outputs, asked, strict=True)
    ]


def dense(engine: LLM, **settings: Any) -> list[Answer]:
    return answers(engine, prompts(300, 17, 129, 64), greedy(24, **settings))


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(VLLMValidationError) as caught:
        call()
    return str(caught.value)


def at_the_maximum(engine: LLM) -> tuple[list[str], Answer]:
    """A prompt that is too long, an empty one, and a request that would outgrow the maximum and ends there."""
    told = [refusal(lambda asked=asked: answers(engine, asked, greedy(4))) for asked in (prompts(400), [[]])]  # type: ignore[misc]
    return told, answers(engine, prompts(LONGEST - 16), greedy(64))[0]


def questions(engine: LLM) -> tuple[dict[str, Any], list[list[float]], list[Answer], tuple[list[str], Answer]]:
    return sampled(engine), chances(engine), dense(engine), at_the_maximum(engine)


def test_every_way_of_sampling_gives_what_stock_gives(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a budget that covers the context, through our own path."""
    expected = engines.by_stock(questions, max_model_len=LONGEST)[0]
    force_own_path(monkeypatch)
    ours = sampled(engines.sparse(COVERED, max_model_len=LONGEST))
    for name in WAYS:
        assert ours[name] == expected[name], name


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
    asked = prompts(100, 70, 80)
    # Of two answers the second finds the first's blocks, in the step in which these are computed.
    settings: dict[str, Any] = {"temperature": 1.0, "n": 2, "max_tokens": 20, "ignore_eos": True}
    params = [SamplingParams(**settings, seed=seed) for seed in (1, 2, 3)]
    alone = [full(visited, [prompt], one)[0] for prompt, one in zip(asked, params, strict=True)]
    assert full(visited, asked, params) == alone  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", among(SPARSE, SPARSE[1:]))
def test_requests_that_are_aborted_leave_nothing_behind(policy: str, visited: LLM) -> None:
    """Two of four are aborted midway; the others' answers are those they give alone, and all blocks come back."""
    asked = prompts(210, 90, 333, 120)
    alone = {str(place): answers(visited, [asked[place]], greedy(30))[0].tokens for place in (1, 2)}
    inner = visited.llm_engine
    for number, prompt in enumerate(asked):
        inner.add_request(str(number), prompt_of(prompt), greedy(30))
    finished: dict[str, tuple[int, ...]] = {}
    for step in range(200):
        for output in inner.step():
            if output.finished:
                finished[output.request_id] = tuple(output.outputs[0].token_ids)
        if step == 9:
            inner.abort_request(["0"])
        if step == 17:
            inner.abort_request(["3"])
        if not inner.has_unfinished_requests():
            break
    assert {name: finished[name] for name in alone} == alone
    scheduler = core(visited).scheduler
    assert not scheduler.requests and not scheduler.running
    assert scheduler.kv_cache_manager.usage == 0
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
    preempted: list[str] = []
    stock = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *rest, **more: (
        preempted.append(request.request_id),
        stock(request, *rest, **more),
    )[1]
    asked = prompts(170, 170, 170)
    found = answers(engine, asked, greedy(50))
    assert [len(answer.tokens) for answer in found] == [50, 50, 50]
    assert preempted, "nobody was preempted: the cache is too large for this test"
    survivors = [number for number in range(3) if not any(name.startswith(str(number)) for name in preempted)]
    assert survivors, "everybody was preempted: nobody is left to compare"
    for number in survivors:
        assert found[number].tokens == answers(engine, [asked[number]], greedy(50))[0].tokens
    told, last = at_the_maximum(engine)
    assert told == refused
    assert last.reason == ended.reason == "length" and len(last.tokens) == len(ended.tokens) == 16


@pytest.mark.parametrize("policy", SPARSE[1:2])
def test_a_copy_of_the_configuration_is_of_the_same_engine(policy: str, visited: LLM) -> None:
    """As vLLM makes one for the decoder of a model that reads images, whose layers then ask with it."""
    config = runner(visited).vllm_config
    copied = config.with_hf_config(config.model_config.hf_config)
    assert copied is not config
    assert serving_of(copied) is serving_of(config)
    assert requests_of(copied) is requests_of(config) is not None


SHARED = (
    "quest:budget=64",
    "quest:budget=64,rectify=8",
    "resa:min_pages=2,ratio=0.05,rectify=16",
    "tidal:budget=64,reselect=7",
    "lychee_cluster:budget=64",
    "lychee_cluster:budget=64,rectify=8",
)


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
