"""Requests that come and go while others decode, and what each of them was answered.

The engines of lossless tests are asked once, in a process of their own; their answers are held against stock's.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from copying import ANSWERS
from engines import Engines, core, tokens_of_text
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


@dataclass(frozen=True)
class Ask:
    """One request, by its prompt's place in the text.

    It comes `when` the first request has so many tokens, or when another one has ended; in its `turn` its prompt stands
    behind the other's prompt and answer. It is given up after `aborted` tokens, if any.
    """

    place: int
    length: int
    tokens: int
    when: int | str = 0
    turn: bool = False
    aborted: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Heard:
    """What it was answered: token ids, of each the ids and log-probabilities asked for, why it ended, what it found."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)
    cached: int = 0


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
LOADS: dict[str, dict[str, Ask]] = {
    "whole": {
        "first": Ask(0, 200, 36),
        "short": Ask(3000, 40, 20),
        "one": Ask(3100, 90, 1),
        "late": Ask(4000, 260, 12, when=6),
        "likely": Ask(5000, 70, 8, when=8, settings={"logprobs": 3, "prompt_logprobs": 1}),
        "penal": Ask(5200, 60, 12, when=9, settings=PENALTIES),
        "gone": Ask(5400, 60, 30, when=12, aborted=6),
        "words": Ask(5600, 70, 12, when=14, settings={"bad_words": ["the", "of"], "min_tokens": 10}),
        "same": Ask(0, 200, 8, when=18),
        "sibling": Ask(0, 170, 8, when=21),
        "turn": Ask(6000, 20, 8, when="first", turn=True),
        "edge": Ask(7000, 500, 200, when=24),
        "ended": Ask(8000, 150, 200, when=27, settings={"ignore_eos": False, "stop": ["."]}),
    },
    "small": {
        "first": Ask(9000, 200, 16),
        "second": Ask(9700, 40, 12),
        "third": Ask(9900, 130, 10, when=6),
    },
}
_numbers = count()


def hear(engine: LLM, name: str) -> dict[str, Heard]:
    """Ask a load; nothing is found in the prefix cache but what it has left there itself."""
    asks, inner, salt = LOADS[name], engine.llm_engine, f"load {next(_numbers)}"
    heard, waiting, running = {one: Heard() for one in asks}, dict(asks), set[str]()
    first, text = heard["first"], tokens_of_text()
    while waiting or running:
        for one, ask in list(waiting.items()):
            due = heard[ask.when].ended if isinstance(ask.when, str) else len(first.tokens) >= ask.when or first.ended
            if not due:
                continue
            prompt = text[ask.place :][: ask.length]
            if ask.turn:
                before, said = asks[str(ask.when)], heard[str(ask.when)].tokens
                prompt = text[before.place :][: before.length] + said + prompt
            settings = {"temperature": 0, "ignore_eos": True, "max_tokens": ask.tokens, **ask.settings}
            inner.add_request(one, TokensPrompt(prompt_token_ids=prompt, cache_salt=salt), SamplingParams(**settings))
            running.add(one)
            del waiting[one]
        for output in inner.step():
            one = output.request_id.partition("-")[0]
            answer, known = output.outputs[0], heard[one]
            if known.ended:
                continue
            known.tokens, chances = list(answer.token_ids), answer.logprobs or ()
            known.logprobs = [sorted((token, one.logprob) for token, one in step.items()) for step in chances]
            if output.finished:
                known.ended, known.cached = [answer.finish_reason, answer.stop_reason], output.num_cached_tokens
                running.discard(one)
            elif 0 < asks[one].aborted <= len(known.tokens):
                inner.abort_request([output.request_id])
                known.ended = ["abort", None]
                running.discard(one)
    # Steps that were scheduled ahead for whoever has ended.
    while inner.has_unfinished_requests():
        inner.step()
    return heard


def turns(engine: LLM) -> dict[str, Heard]:
    """A prompt, the same again, and one behind its answer, none in the prefix cache: what is found is elsewhere."""
    heard, prompt, scheduler = dict[str, Heard](), tokens_of_text()[12000:12184], core(engine).scheduler
    settings = SamplingParams(temperature=0, ignore_eos=True, max_tokens=10, logprobs=0)
    for name in ("first", "same", "turn"):
        (output,) = engine.generate([{"prompt_token_ids": prompt, "cache_salt": "turns"}], settings, use_tqdm=False)
        answer = output.outputs[0]
        chances = [[(token, one.logprob) for token, one in step.items()] for step in answer.logprobs]
        ended = [answer.finish_reason, answer.stop_reason]
        heard[name] = Heard(list(answer.token_ids), chances, ended, output.num_cached_tokens)
        while scheduler.has_requests():  # what is stored behind the answer
            engine.llm_engine.step()
        assert engine.reset_prefix_cache()
        prompt = prompt + heard["first"].tokens + tokens_of_text()[14000:14020] if name == "same" else prompt
    return heard


SCRIPT = Path(__file__).with_name("lossless_engines.py")
ON_V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 128, "enable_prefix_caching": True, "max_num_seqs": 6}
SETTINGS |= {"max_model_len": 512}
DISTURBED = ["whole", "small:foreign", "small:covered"]
TIDAL: dict[str, Any] = {"policy": "tidal:budget=112,reselect=7", "loads": DISTURBED}
AHEAD: dict[str, Any] = {"policy": "less_is_more:budget=48,reselect=7", "loads": ["whole"], "ahead": True}
FEW: dict[str, Any] = {"policy": "quest:budget=48", "loads": ["whole:spoiled", "kept"]}
FEW |= {"settings": {"num_gpu_blocks_override": 22}}
TOKENS: dict[str, Any] = {**FEW, "policy": "token_clusters:budget=48,sinks=4", "loads": ["whole:spoiled"]}
CARRIED: dict[str, Any] = {"policy": "tidal:budget=48,reselect=7", "loads": ["turns:spoiled"], "ahead": True}
CARRIED |= {"settings": {"kv_transfer_config": ANSWERS}}
EVERY_TIME = (TIDAL, AHEAD, FEW, TOKENS)
"""A published set, a union, bounds of pages, an index; scheduled ahead, and with too few blocks for all requests."""
DRAFTED = [0, 1, 4, 2, 0, 0, 7, 1]
SCRIPTED: tuple[dict[str, Any], ...] = (
    {"policy": "quest:budget=64", "drafts": 8, "loads": ["small"], "lengths": DRAFTED},
    {"policy": "lychee_cluster:budget=128", "drafts": 8, "loads": ["small"], "lengths": DRAFTED, "ahead": True},
)
"""Engines of `test_adaptive`, in the process of those above; `lengths`: how many each cycle drafts, over and over."""


def by_stock(engine: Any) -> dict[str, dict[str, Heard]]:
    return {name: hear(engine, name) for name in LOADS} | {"turns": turns(engine)}


@cache
def found(engines: str) -> dict[tuple[str, int, str], dict[str, Any]]:
    """What engines of model runner V2 did, as JSON tells of them; by policy, drafts and load."""
    environment = {**os.environ, **ON_V2, "PROMETHEUS_MULTIPROC_DIR": mkdtemp()}
    given = [sys.executable, str(SCRIPT), engines]
    run = subprocess.run(given, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, f"the engines did not answer:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    told = json.loads(lines[0].removeprefix("FOUND "))
    return {(one["policy"], one["drafts"], one["load"]): one for one in told}


@cache
def started_every_time() -> dict[tuple[str, int, str], dict[str, Any]]:
    asked = (*EVERY_TIME, CARRIED, *SCRIPTED)
    Engines.started += len(asked)
    return found(json.dumps(asked))


def check_heard(heard: dict[str, Any], expected: dict[str, Heard]) -> None:
    """Tokens, ends and log-probabilities are vLLM's; of a request that was given up, as far as it came."""
    for name, known in expected.items():
        told = heard[name]
        if known.ended[0] == "abort":
            both = min(len(told["tokens"]), len(known.tokens))
            assert both >= LOADS["whole"][name].aborted and told["tokens"][:both] == known.tokens[:both]
            continue
        assert (name, told["tokens"]) == (name, known.tokens)
        assert told["ended"] == known.ended
        for step, known_step in zip(told["logprobs"], known.logprobs, strict=True):
            assert [one for one, _ in step] == [one for one, _ in known_step]
            # Roundings of products over other numbers of rows.
            assert [chance for _, chance in step] == pytest.approx([chance for _, chance in known_step], abs=1e-3)
