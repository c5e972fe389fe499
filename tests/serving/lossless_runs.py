"""The engines that lossless tests ask, each once in a process of its own, and how answers are held against stock's."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import loads
import pytest
from copying import ANSWERS
from engines import Engines

SCRIPT = Path(__file__).with_name("lossless_engines.py")
ON_V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": True,
    "max_num_seqs": 6,
    "max_model_len": 512,
}
TIDAL: dict[str, Any] = {
    "policy": "tidal:budget=112,reselect=7",
    "loads": ["whole", "small:foreign", "small:covered"],
}
AHEAD: dict[str, Any] = {"policy": "less_is_more:budget=48,reselect=7", "loads": ["whole"], "ahead": True}
FEW: dict[str, Any] = {
    "policy": "quest:budget=48",
    "loads": ["whole:spoiled", "kept"],
    "settings": {"num_gpu_blocks_override": 22},
}
TOKENS: dict[str, Any] = {**FEW, "policy": "token_clusters:budget=48,sinks=4", "loads": ["whole:spoiled"]}
CARRIED: dict[str, Any] = {
    "policy": "tidal:budget=48,reselect=7",
    "loads": ["turns:spoiled"],
    "settings": {"kv_transfer_config": ANSWERS},
    "ahead": True,
}
EVERY_TIME = (TIDAL, AHEAD, FEW, TOKENS)
"""A published set, a union, bounds of pages, an index; scheduled ahead, and with too few blocks for all requests."""
DRAFTED = [0, 1, 4, 2, 0, 0, 7, 1]
SCRIPTED: tuple[dict[str, Any], ...] = (
    {"policy": "quest:budget=64", "drafts": 8, "loads": ["small"], "lengths": DRAFTED},
    {"policy": "lychee_cluster:budget=128", "drafts": 8, "loads": ["small"], "lengths": DRAFTED, "ahead": True},
)
"""Engines of `test_adaptive`, in the process of those above; `lengths`: how many each cycle drafts, over and over."""


def by_stock(engine: Any) -> dict[str, dict[str, loads.Heard]]:
    return {name: loads.hear(engine, name) for name in loads.LOADS} | {"turns": loads.turns(engine)}


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


def check_heard(heard: dict[str, Any], expected: dict[str, loads.Heard]) -> None:
    """Tokens, ends and log-probabilities are vLLM's; of a request that was given up, as far as it came."""
    for name, known in expected.items():
        told = heard[name]
        if known.ended[0] == "abort":
            both = min(len(told["tokens"]), len(known.tokens))
            assert both >= loads.LOADS["whole"][name].aborted and told["tokens"][:both] == known.tokens[:both]
            continue
        assert (name, told["tokens"]) == (name, known.tokens)
        assert told["ended"] == known.ended
        for step, known_step in zip(told["logprobs"], known.logprobs, strict=True):
            assert [one for one, _ in step] == [one for one, _ in known_step]
            # Roundings of products over other numbers of rows.
            assert [chance for _, chance in step] == pytest.approx([chance for _, chance in known_step], abs=1e-3)
