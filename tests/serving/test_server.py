"""A server under load, as its users see it: through the official client, on loopback, with the bundled model.

One server for the module: pages by their bounds, dense passes, prompts in chunks, more streams than it decodes at once.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import tokens_of_text
from openai import AsyncOpenAI, BadRequestError, OpenAI
from server import OURS, OURS_ALONE, START_SECONDS, STOCK, Running, eventually, running

from saccade.adapters.vllm.metrics import VARIABLE
from saccade.checkpoints.bundled import model_path

EVERY = 8
POLICY = f"resa:min_pages=2,rectify={EVERY}"
MODEL = "bundled"
STREAMS = 18
ANSWER = 20
CACHE = 512 * 2**20
"""More than all streams hold together, so that nobody is preempted: a preempted request may answer differently."""
ROUNDS = 12
MARGIN = STREAMS * 2**16
"""64 KiB for each stream of a round, which holds 4 MiB of cache on average. Settled: less than 1 MiB."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOOLS_SERVED = ("--chat-template", TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
REQUESTS = f"saccade_requests_total{{{POLICY}}}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # Most processors compute bfloat16 without instructions for it.
    settings = {"policy": POLICY, "recall": 0.25, "dtype": "float32", "kv-cache-memory-bytes": CACHE}
    settings |= {"max-model-len": 2048, "max-num-seqs": 12, "max-num-batched-tokens": 512}
    arguments = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    # The worker in the engine's process, as on one GPU: a third one imports vLLM too, and the engine's spins beside it.
    told = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with running(tmp_path_factory.mktemp("server"), *arguments, *TOOLS_SERVED, "--enforce-eager", **told) as started:
        yield started


@pytest.fixture
def client(server: Running) -> OpenAI:
    return client_of(server)


def asking(ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request for exactly so many tokens, which come back as ids."""
    body = {"ignore_eos": True, "return_token_ids": True, **more}
    return {"model": MODEL, "prompt": ids, "max_tokens": tokens, "temperature": 0, "extra_body": body}


def alone(client: OpenAI, ids: list[int], tokens: int, **more: Any) -> list[int]:
    """The answer to one request; its salt keeps it from what others have left in the prefix cache."""
    salt = {"cache_salt": f"{random.random()}"}
    choice: Any = client.completions.create(**asking(ids, tokens, **salt, **more)).choices[0]
    return list(choice.token_ids)


async def stream(client: AsyncOpenAI, ids: list[int], stop_after: int | None) -> list[int] | None:
    """The answer to one request of many; None if it was cancelled, after so many tokens."""
    came = list[int]()
    async with await client.completions.create(**asking(ids, ANSWER), stream=True) as chunks:
        async for chunk in chunks:
            choice: Any = chunk.choices[0]
            came += choice.token_ids or []
            if stop_after is not None and len(came) >= stop_after:
                return None
    return came


async def load(server: Running, seed: int) -> list[tuple[list[int], list[int] | None]]:
    """Prompts and answers of one round: a third of the streams is cancelled, before the first token or later."""
    chance = random.Random(seed)
    prompts = [tokens_of_text()[chance.randrange(40_000) :][: chance.randrange(20, 400)] for _ in range(STREAMS)]
    stops = [chance.randrange(ANSWER) if number % 3 == 0 else None for number in range(STREAMS)]
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        tasks = []
        for ids, stop in zip(prompts, stops, strict=True):
            tasks.append(asyncio.create_task(stream(client, ids, stop)))
            if stop == 0:
                await asyncio.sleep(chance.random() / 10)
                tasks[-1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return [(ids, answer if isinstance(answer, list) else None) for ids, answer in zip(prompts, answers, strict=True)]


def test_under_load_every_answer_is_the_one_given_alone(server: Running, client: OpenAI) -> None:
    """And nothing stays behind: no request, no block, no memory."""
    resident = [server.resident()]
    # Buffers and libraries take what they keep in the first rounds, a busy machine's in more; a leak grows in all.
    while len(resident) < 3 or max(resident[-2:]) - resident[-3] >= MARGIN:
        assert len(resident) <= ROUNDS, resident
        counted = server.metrics()
        answers = asyncio.run(load(server, len(resident)))
        assert eventually(server.idle)
        resident.append(server.resident())
    now = server.metrics()
    completed = [(ids, answer) for ids, answer in answers if answer is not None]
    assert len(completed) == STREAMS - len(range(0, STREAMS, 3)) <= now[REQUESTS] - counted[REQUESTS] <= STREAMS
    assert now["saccade_preemptions_total"] == 0
    assert now["saccade_rectifications_total"] > counted["saccade_rectifications_total"]
    for ids, answer in completed:
        assert answer == alone(client, ids, ANSWER)


def test_a_request_that_cannot_be_answered_is_told_why(server: Running, client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        alone(client, tokens_of_text()[:10], 4, vllm_xargs={"saccade": "maybe"})
    told = str(refused.value)
    assert "'maybe'" in told and '"off"' in told and len(told) < 2000
    assert len(alone(client, tokens_of_text()[:100], 5)) == 5
    assert eventually(server.idle)


PLACE, DAYS = {"enum": ["Bern", "Rome"]}, {"enum": [1, 2, 3]}
SHAPE: dict[str, Any] = {"type": "object", "properties": {"city": PLACE, "days": DAYS}, "required": ["city", "days"]}
FUNCTIONS = [{"name": name, "strict": True, "parameters": SHAPE} for name in ("weather", "forecast")]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]
CHOICES: dict[str, Any] = {"required": "required", "named": {"type": "function", "function": {"name": "forecast"}}}


def client_of(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def called(client: OpenAI, choice: Any, **more: Any) -> tuple[str, str]:
    """The one tool that is called, and its arguments as they were written; a penalty ends what would repeat."""
    asked: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "extra_body": more}
    asked |= {"model": MODEL, "temperature": 0, "max_tokens": 120, "frequency_penalty": 1}
    text: Any = [{"role": "user", "content": "Tell me what the sky over the city will be like. " * 20}]
    (call,) = client.chat.completions.create(messages=text, **asked).choices[0].message.tool_calls
    return call.function.name, call.function.arguments


@pytest.mark.parametrize("name", CHOICES)
def test_a_tool_is_called_in_its_form(client: OpenAI, name: str) -> None:
    """Under a policy, which calls otherwise than the model does without one."""
    tool, written = called(client, CHOICES[name])
    arguments = json.loads(written)
    assert (tool == "forecast" or name == "required") and arguments.keys() == SHAPE["properties"].keys()
    assert arguments["city"] in PLACE["enum"] and arguments["days"] in DAYS["enum"]
    assert called(client, CHOICES[name], vllm_xargs={"saccade": "off"}) != (tool, written)


@pytest.mark.walk
def test_tools_are_called_as_stock_calls_them(tmp_path: Path) -> None:
    """Under a budget that covers; two servers, one after the other."""
    settings = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--kv-cache-memory-bytes")
    stock = "--model", str(model_path()), "--served-model-name", MODEL
    programs, found = {OURS: ("--policy", "quest:budget=4096,rectify=8"), STOCK: stock}, []
    for program, more in programs.items():
        with running(tmp_path, *more, *settings, str(CACHE), *TOOLS_SERVED, program=program) as one:
            found.append([called(client_of(one), choice) for choice in CHOICES.values()])
    assert found[0] == found[1]


def test_metrics_say_what_was_asked(server: Running, client: OpenAI) -> None:
    assert eventually(server.idle)
    before = server.metrics()
    asked = [(600, 30), (250, 17), (40, 1), (90, EVERY + 2)]
    for length, tokens in asked:
        alone(client, tokens_of_text()[:length], tokens)
    alone(client, tokens_of_text()[:300], 20, vllm_xargs={"saccade": "off"})
    steps = sum(tokens - 1 for _, tokens in asked)

    def counted() -> dict[str, float]:
        now = server.metrics()
        return {name: now[name] - before[name] for name in now if name.startswith("saccade_")}

    # The last step of a batch is reported when the batch is found empty, which is after its answer.
    assert eventually(lambda: counted()["saccade_tokens_decoded_total"] == steps), counted()
    found, now = counted(), server.metrics()
    assert (found[REQUESTS], found["saccade_requests_total{off}"]) == (len(asked), 1)
    cached = sum(length + step for length, tokens in asked for step in range(1, tokens))
    assert found["saccade_tokens_attended_total"] + found["saccade_tokens_skipped_total"] == pytest.approx(cached)
    passes = sum((tokens - 1) // (EVERY + 1) for _, tokens in asked)
    assert (found["saccade_rectifications_total"], found["saccade_rectified_tokens_total"]) == (passes, EVERY * passes)
    # Every fourth sparse step, wherever counting stood.
    assert found["saccade_attention_recall_count"] in ((steps - passes) // 4, -(-(steps - passes) // 4))
    assert 0 < found["saccade_attention_recall_sum"] <= found["saccade_attention_recall_count"]
    attended, skipped = (now[f"saccade_tokens_{what}_total"] for what in ("attended", "skipped"))
    assert now["saccade_share_attended"] == pytest.approx(attended / (attended + skipped))
    assert 0 < now["saccade_share_attended"] < 0.5


def test_it_listens_on_this_machine_only(server: Running) -> None:
    # All of 127.0.0.0/8 is this machine, so that whoever listens on all addresses answers here too.
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.2:{server.port}/health", timeout=10)


@pytest.mark.walk
def test_the_example_answers_sparsely_and_densely_and_ends(tmp_path: Path) -> None:
    """`examples/serve.py` as a user runs it: a server of its own, an answer from the official client, and the end."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS_ALONE}
    command = [sys.executable, str(Path(__file__).parents[2] / "examples" / "serve.py")]
    told: Any = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": START_SECONDS}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, **told)
    log = (tmp_path / "server.log").read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stderr + log
    assert "\nsaccade on: 4821\nsaccade off: 4821\nthe server has ended with status 0\n" in done.stdout
    assert "policy   tidal:budget=256,reselect=7" in log
    assert [child.cmdline() for child in psutil.Process().children() if "serve" in child.cmdline()] == []


def test_it_stops_when_it_is_told(server: Running) -> None:
    """The last test of this module."""
    # A process that was started later: a process's own environment is shown as it was at its start.
    children = psutil.Process(server.process.pid).children(recursive=True)
    folder = Path(next(one.environ()[VARIABLE] for one in children if VARIABLE in one.environ()))
    assert list(folder.glob("*.db"))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not folder.exists()
