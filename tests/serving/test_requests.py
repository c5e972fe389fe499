"""What users ask of a server besides tokens: the same behaviour as stock vLLM, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines import Engines, answers, core, force_own_path, greedy, prompts, runner
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt

from saccade.adapters.vllm.worker.requests import requests_of
from saccade.adapters.vllm.worker.worker import serving_of

COVERED = "quest:budget=4096,rectify=6"
SPARSE = (
    "quest:budget=64",
    "quest:budget=64,rectify=6",
    "tidal:budget=64,reselect=7",
    "lychee_cluster:budget=64,rectify=6",
)

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
    outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in asked], params, use_tqdm=False)
    return [
        [(tuple(part.token_ids), part.text, part.finish_reason, part.stop_reason) for part in output.outputs]
        for output in outputs
    ]


def test_every_way_of_sampling_gives_what_stock_gives(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a budget that covers the context, through our own path."""
    asked = prompts(90, 33, 150)
    force_own_path(monkeypatch)
    stock, ours = engines.stock(), engines.sparse(COVERED)
    for name, settings in WAYS.items():
        params = SamplingParams(**settings)
        assert full(ours, asked, params) == full(stock, asked, params), name


def test_prompt_log_probabilities_are_those_of_stock(engines: Engines) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    asked = prompts(70, 41)

    def chances(engine: LLM) -> list[list[float]]:
        outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in asked], params, use_tqdm=False)
        return [
            [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            for output, ids in zip(outputs, asked, strict=True)
        ]

    expected = chances(engines.stock())
    for ours, theirs in zip(chances(engines.sparse("quest:budget=32")), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(VLLMValidationError) as caught:
        call()
    return str(caught.value)


def test_too_long_and_empty_prompts_are_refused_as_stock_refuses_them(engines: Engines) -> None:
    stock, ours = engines.stock(max_model_len=256), engines.sparse("quest:budget=64", max_model_len=256)
    for asked in (prompts(300), [[]]):
        assert refusal(lambda asked=asked: answers(ours, asked, greedy(4))) == refusal(  # type: ignore[misc]
            lambda asked=asked: answers(stock, asked, greedy(4))  # type: ignore[misc]
        )
    # A request that would outgrow the maximum ends there, as stock ends it.
    ended = [answers(engine, prompts(240), greedy(64))[0] for engine in (stock, ours)]
    assert [len(answer.tokens) for answer in ended] == [16, 16] and ended[0].reason == ended[1].reason == "length"


@pytest.mark.parametrize("policy", SPARSE)
def test_answers_do_not_depend_on_neighbours(policy: str, engines: Engines) -> None:
    """Several answers per prompt, each of its own seed, alone and in one batch.

    Prompts come in one chunk: stock vLLM 0.32 crashes on a CPU where a request with a seed is prefilled in several.
    """
    engine = engines.sparse(policy)
    asked = prompts(210, 90, 333)
    params = [SamplingParams(temperature=1.0, n=2, seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 2, 3)]
    alone = [full(engine, [prompt], one)[0] for prompt, one in zip(asked, params, strict=True)]
    assert full(engine, asked, params) == alone  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", SPARSE)
def test_requests_that_are_aborted_leave_nothing_behind(policy: str, engines: Engines) -> None:
    """Two of four are aborted midway; the others' answers are those they give alone, and all blocks come back."""
    engine = engines.sparse(policy, enable_prefix_caching=True)
    asked = prompts(210, 90, 333, 120)
    alone = {str(place): answers(engine, [asked[place]], greedy(30))[0].tokens for place in (1, 2)}
    inner = engine.llm_engine
    for number, prompt in enumerate(asked):
        inner.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), greedy(30))
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
    scheduler = core(engine).scheduler
    assert not scheduler.requests and not scheduler.running
    assert scheduler.kv_cache_manager.usage == 0
    # One more batch, after which the worker has heard of all that ended: it remembers none of them.
    answers(engine, prompts(20), greedy(2))
    answers(engine, prompts(20), greedy(2))
    rows = requests_of(runner(engine).vllm_config)
    assert rows is not None and len(rows.rows) + len(rows._away) <= 1


@pytest.mark.parametrize("policy", SPARSE)
def test_preempted_requests_finish_and_are_counted(policy: str, engines: Engines) -> None:
    """A cache too small for all: some requests lose their blocks and are computed anew."""
    engine = engines.sparse(policy, num_gpu_blocks_override=20, max_model_len=320)
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


def test_a_copy_of_the_configuration_is_of_the_same_engine(engines: Engines) -> None:
    """As vLLM makes one for the decoder of a model that reads images, whose layers then ask with it."""
    config = runner(engines.sparse("quest:budget=64")).vllm_config
    copied = config.with_hf_config(config.model_config.hf_config)
    assert copied is not config
    assert serving_of(copied) is serving_of(config)
    assert requests_of(copied) is requests_of(config) is not None
