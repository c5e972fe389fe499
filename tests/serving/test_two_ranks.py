"""Two ranks, each with half of the heads or of the requests, choose what one rank chooses.

Run as a program, in processes of its own, it prints the tokens that a policy gives on two ranks.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from engines import Engines, answers, greedy, prompts
from openai import OpenAI
from server import running
from vllm import LLM
from vllm.v1.executor import multiproc_executor

from walking import among

POLICIES = ("less_is_more:budget=48,reselect=7", "lychee_decode:budget=64,roles=every:3")
STEPS = 12


def tokens(engine: LLM) -> list[list[int]]:
    return [list(answer.tokens) for answer in answers(engine, prompts(170, 60, 110), greedy(STEPS))]


def two_cores() -> str:
    """One core for each rank, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


def on_two_ranks(policy: str) -> list[list[int]]:
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": two_cores(), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, policy]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, f"the engine on two ranks did not answer:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    answered: list[list[int]] = json.loads(lines[0].removeprefix("TOKENS "))
    return answered


@pytest.mark.parametrize("policy", among(POLICIES, POLICIES[:1]))
def test_two_ranks_answer_what_one_answers(policy: str, engines: Engines) -> None:
    assert on_two_ranks(policy) == tokens(engines.sparse(policy))


@pytest.mark.walk
def test_two_replicas_answer_as_one(tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallelism: a server with two engines, each of which answers some of the requests."""
    policy, asked = POLICIES[0], prompts(*range(60, 220, 20))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", two_cores())
    settings = ("--policy", policy, "--max-model-len", "2048", "--kv-cache-memory-bytes", str(2**28), "--enforce-eager")
    with running(tmp_path, *settings, "--data-parallel-size", "2") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        told: dict[str, Any] = {"model": "bundled", "max_tokens": STEPS, "temperature": 0}
        told["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        with ThreadPoolExecutor(len(asked)) as pool:
            given: Any = [*pool.map(lambda ids: client.completions.create(prompt=ids, **told).choices[0], asked)]
        ended = [line.split() for line in server.get("/metrics").splitlines() if 'finished_reason="length"' in line]
    assert len(ended) == 2 and all(float(count) > 0 for _, count in ended), ended
    assert sum(float(count) for _, count in ended) == len(asked)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = [tuple(choice.token_ids) for choice in given]
    assert found == [answer.tokens for answer in answers(engines.sparse(policy), asked, greedy(STEPS))]


if __name__ == "__main__":
    # vLLM spawns ranks on a CPU, each of which imports it anew.
    multiproc_executor.get_mp_context = partial(get_context, "fork")
    found = tokens(Engines().sparse(sys.argv[1], tensor_parallel_size=2))
    sys.stdout.write("\nTOKENS " + json.dumps(found) + "\n")
