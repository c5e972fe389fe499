"""Lossless servers as users see them: streams that come and go, a third of them cancelled, on one device and on two.

`SACCADE_STREAMED=FOLDER` names a model other than the bundled one, `SACCADE_STREAMED_POLICY` its policy,
`SACCADE_STREAMED_CACHE` how keys and values are kept. Answers are held against stock vLLM, and how often they differ
against stock that drafts from n-grams: see test_lossless_gpu.py.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cuda_engines import say
from openai import AsyncOpenAI
from server import OURS, STOCK, Running, eventually, running
from transformers import AutoTokenizer

from saccade.checkpoints.bundled import model_path
from saccade.eval.document import language_reference

MODEL = os.environ.get("SACCADE_STREAMED", str(model_path()))
POLICY = os.environ.get("SACCADE_STREAMED_POLICY", "less_is_more:budget=192,reselect=7,rectify=8:verify")
STREAMS, ROWS, SHOWN = 24, 12, 5
ASKS = [(701 * number, 60 + 151 * number % 1700, 40 + 17 * number % 90) for number in range(STREAMS)]
"""Where prompts begin, their lengths, and most tokens of answers."""
# Single tokens are looked up too, so that it verifies about as often as ours.
NGRAMS = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
SERVERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stock": (STOCK, ()),
    "n-grams": (STOCK, ("--speculative-config", NGRAMS)),
    "ours": (OURS, ("--policy", POLICY)),
}
SETTINGS = {
    "model": MODEL,
    "served-model-name": "served",
    "dtype": "bfloat16",
    "kv-cache-dtype": os.environ.get("SACCADE_STREAMED_CACHE", "auto"),
    "seed": 0,
    "max-model-len": 2048,
    "max-num-seqs": ROWS,
    "max-num-batched-tokens": 512,
    "kv-cache-memory-bytes": 2**31,
    "gpu-memory-utilization": 0.05,
}


@dataclass
class Heard:
    """What came of one request; likely: of every token the likeliest ones with their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    likely: list[dict[int, float]] = field(default_factory=list)


async def stream(client: AsyncOpenAI, number: int, prompt: list[int]) -> Heard:
    """Every third is cancelled when half of its tokens have come."""
    heard, most = Heard(), ASKS[number][2]
    body = {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    await asyncio.sleep(number / 20)
    pieces = await client.completions.create(
        model="served", prompt=prompt, max_tokens=most, temperature=0, logprobs=SHOWN, stream=True, extra_body=body
    )
    async for piece in pieces:
        for choice in piece.choices:
            one: Any = choice
            heard.tokens += one.token_ids
            heard.likely += [
                {int(name.rpartition(":")[2]): chance for name, chance in step.items()}
                for step in one.logprobs.top_logprobs
            ]
        if number % 3 == 2 and len(heard.tokens) >= most / 2:
            await pieces.close()
            break
    return heard


async def streams(server: Running) -> list[Heard]:
    reader = AutoTokenizer.from_pretrained(MODEL)
    text = reader(language_reference(held_out=True))["input_ids"]
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        prompts = [text[start : start + length] for start, length, _ in ASKS]
        return await asyncio.gather(*(stream(client, number, prompt) for number, prompt in enumerate(prompts)))


@dataclass(frozen=True)
class Asked:
    """What each server answered, its metrics afterwards, and whether nothing was left in it."""

    heard: dict[str, list[Heard]]
    metrics: dict[str, dict[str, float]]
    idle: dict[str, bool]


@pytest.fixture(scope="module", params=range(1, min(torch.cuda.device_count(), 2) + 1), ids="{} devices".format)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """All servers start side by side, and are asked one after the other."""
    given = {**SETTINGS, "tensor-parallel-size": request.param}
    arguments = [str(part) for name, value in given.items() for part in (f"--{name}", value)]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("VLLM_BATCH_INVARIANT", "1")

        def started(name: str) -> Running:
            program, more = SERVERS[name]
            return stack.enter_context(running(tmp_path_factory.mktemp(name), *arguments, *more, program=program))

        servers = dict(zip(SERVERS, pool.map(started, SERVERS), strict=True))
        heard = {name: asyncio.run(streams(server)) for name, server in servers.items()}
        idle = {name: eventually(server.idle) for name, server in servers.items()}
        yield Asked(heard, {name: server.metrics() for name, server in servers.items()}, idle)


def gaps(mine: list[Heard], stock: list[Heard]) -> list[float]:
    """Of answers that part from stock's, how much more stock prefers its own first token that is another."""
    found = []
    for one, other in zip(mine, stock, strict=True):
        both = zip(one.tokens, other.tokens, other.likely, strict=False)
        apart = next(((ours, theirs, likely) for ours, theirs, likely in both if ours != theirs), None)
        if apart is not None:
            ours, theirs, likely = apart
            found.append(likely[theirs] - likely.get(ours, -torch.inf))
    return found


def test_streams_are_whole_or_cancelled(asked: Asked) -> None:
    for name, heard in asked.heard.items():
        for number, (one, (_, _, most)) in enumerate(zip(heard, ASKS, strict=True)):
            came = len(one.tokens)
            assert (most / 2 <= came < most) if number % 3 == 2 else came == most, (name, number)
        assert asked.idle[name], name


def test_answers_are_those_of_stock_that_verifies(asked: Asked) -> None:
    """No oftener others than those of stock with n-grams but for chance, and as near."""
    ours, theirs = (gaps(asked.heard[name], asked.heard["stock"]) for name in ("ours", "n-grams"))
    for name, found in (("ours", ours), ("n-grams", theirs)):
        say(f"{name}: {len(found)} of {STREAMS} answers are others, by {sorted(found, reverse=True)}")
    assert len(ours) <= len(theirs) + 2 * len(theirs) ** 0.5
    assert max(ours, default=0) <= 2 * max(theirs, default=0)


def test_drafts_were_verified(asked: Asked) -> None:
    """By the server's own counters; neither all nor none of them stood."""
    found = asked.metrics["ours"]
    drafted, accepted = (found[f"vllm:spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted"))
    say(f"drafted {drafted:.0f}, accepted {accepted:.0f}")
    assert 0 < accepted < drafted
