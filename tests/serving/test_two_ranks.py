"""Two ranks, each with half of the heads or of the requests, choose what one rank chooses."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import two_ranks
from engines import Engines, answers, greedy, prompts
from openai import OpenAI
from server import running

from walking import among

POLICIES = ("less_is_more:budget=48,reselect=7", "lychee_decode:budget=64,roles=every:3")


def two_cores() -> str:
    """One core for each rank, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


def on_two_ranks(policy: str) -> list[list[int]]:
    """The answers of two processes."""
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": two_cores()}
    script = Path(two_ranks.__file__)
    run = subprocess.run(
        [sys.executable, str(script), policy], capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, f"the engine on two ranks did not answer:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    answered: list[list[int]] = json.loads(lines[0].removeprefix("TOKENS "))
    return answered


@pytest.mark.parametrize("policy", among(POLICIES, POLICIES[:1]))
def test_two_ranks_answer_what_one_answers(policy: str, engines: Engines) -> None:
    assert on_two_ranks(policy) == two_ranks.tokens(engines.sparse(policy))


@pytest.mark.walk
def test_two_replicas_answer_what_one_answers(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data parallelism: a server with two engines, each of which answers some of the requests."""
    policy, asked = POLICIES[0], prompts(*range(60, 220, 20))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", two_cores())
    settings = ("--policy", policy, "--max-model-len", "2048", "--kv-cache-memory-bytes", str(2**28), "--enforce-eager")
    with running(tmp_path, *settings, "--data-parallel-size", "2") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        told: dict[str, Any] = {"model": "bundled", "max_tokens": two_ranks.STEPS, "temperature": 0}
        told["extra_body"] = {"ignore_eos": True, "return_token_ids": True}

        def answered(ids: list[int]) -> tuple[int, ...]:
            choice: Any = client.completions.create(prompt=ids, **told).choices[0]
            return tuple(choice.token_ids)

        with ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(answered, asked))
        ended = [line.split() for line in server.get("/metrics").splitlines() if 'finished_reason="length"' in line]
    assert len(ended) == 2 and all(float(count) > 0 for _, count in ended), ended
    assert sum(float(count) for _, count in ended) == len(asked)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert found == [answer.tokens for answer in answers(engines.sparse(policy), asked, greedy(two_ranks.STEPS))]
