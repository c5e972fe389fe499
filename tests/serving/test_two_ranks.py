"""Tensor parallelism: two ranks, each with half of the heads, choose what one rank chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import two_ranks
from engines import Engines

from walking import among

POLICIES = ("less_is_more:budget=48,reselect=7", "lychee_decode:budget=64,roles=every:3")


def on_two_ranks(policy: str) -> list[list[int]]:
    """The answers of two processes, one core each where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
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
    alone = two_ranks.tokens(engines.sparse(policy))
    assert on_two_ranks(policy) == alone
