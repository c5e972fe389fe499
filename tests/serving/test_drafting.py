"""What a lossless engine is started with, and what it refuses in one line, before there is an engine."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import unstarted
from transformers import Qwen3NextConfig
from unstarted import SMALL, model

from saccade.adapters.vllm.checks import SCHEDULER
from saccade.adapters.vllm.lossless import ADAPTIVE, WORKER
from saccade.adapters.vllm.server.serve import prepare
from saccade.checkpoints.bundled import model_path


@pytest.fixture(autouse=True)
def _runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


LOSSLESS = "quest:rectify=8:verify"
FIXED = {"method": "draft_model", "model": str(model_path()), "num_speculative_tokens": 8}
FIXED |= {"draft_sample_method": "probabilistic"}
SIZES = [[1, 1, 1], [2, 2, 3], [3, 3, 7], [4, 4, 0]]
PROPER = {**FIXED, "num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": SIZES}
"""All lengths, so that vLLM captures them."""
SEQS = ("--max-num-seqs", "8")


made = partial(unstarted.made, *SEQS, policy=LOSSLESS)
reasons = partial(unstarted.reasons, *SEQS, policy=LOSSLESS)


def test_verification_brings_its_worker_its_scheduler_and_slots() -> None:
    server = made()
    assert (server.args.worker_cls, server.args.scheduler_cls) == (WORKER, ADAPTIVE)
    assert server.args.speculative_config == PROPER
    assert (server.options.drafts, server.options.rewrites) == (8, None)


@pytest.mark.parametrize(("drafts", "rows"), [(8, 64), (16, 32), (6, 128), (600, 12)])
def test_as_many_rows_as_have_graphs_unless_it_is_said(drafts: int, rows: int) -> None:
    """vLLM's own number would be refused on most cards: 1,024 rows and steps of 8,192 tokens."""
    policy, room = f"streaming:budget=2048,rectify={drafts}:verify", ("--max-num-batched-tokens", "8192")
    assert prepare(["--port", "0", *room], policy=policy).args.max_num_seqs == rows


@pytest.mark.parametrize(("proper", "scheduler"), [(PROPER, ADAPTIVE), (FIXED, None)])
def test_what_is_said_by_hand_stays(proper: dict[str, Any], scheduler: str | None) -> None:
    """Also how drafts are sampled; without numbers by batch there are always as many, of any number of rows."""
    for method in ("greedy", "probabilistic"):
        given = {**proper, "draft_sample_method": method}
        args = made("--worker-cls", WORKER, "--speculative-config", json.dumps(given)).args
        assert (args.speculative_config, args.scheduler_cls) == (given, scheduler)
    assert made("--speculative-config", json.dumps(FIXED), "--max-num-seqs", "1")


def _speculative(**settings: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps({**PROPER, **settings})


@pytest.mark.parametrize(
    ("policy", "rest", "words"),
    [
        (LOSSLESS, _speculative(num_speculative_tokens=4), "needs --speculative-config"),
        (LOSSLESS, _speculative(rejection_sample_method="block"), "needs --speculative-config"),
        (LOSSLESS, ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 8}'), json.dumps(PROPER)),
        (LOSSLESS, ("--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"), f"needs --worker-cls {WORKER}"),
        (LOSSLESS, ("--scheduler-cls", SCHEDULER), f"needs --scheduler-cls {ADAPTIVE}"),
        (
            LOSSLESS,
            ("--speculative-config", json.dumps(FIXED), "--scheduler-cls", ADAPTIVE),
            "leave out --scheduler-cls",
        ),
        (LOSSLESS, _speculative(num_speculative_tokens_per_batch_size=[[1, 9, 7]]), json.dumps(PROPER)),
        (
            LOSSLESS,
            ("--max-num-seqs", "3"),
            "needs --max-num-seqs 4 or more: vLLM captures one length (0, 1, 3, 7) for each number of rows",
        ),
        (LOSSLESS, ("--enable-lora",), "leave out --enable-lora"),
        (LOSSLESS, ("--enable-prompt-embeds",), "--enable-prompt-embeds"),
        (LOSSLESS, ("--max-num-batched-tokens", "71"), "counted as 9, in a step of 71: --max-num-seqs 7"),
        (LOSSLESS, ("--max-num-batched-tokens", "8"), "raise --max-num-batched-tokens"),
        ("token_clusters:budget=96,rectify=32:verify", (), "budget=96 cannot hold 16 sinks"),
        ("quest:budget=64", ("--speculative-config", json.dumps(PROPER)), "or drafts them itself: rectify=8:verify"),
    ],
)
def test_what_cannot_be_drafted_or_verified(policy: str, rest: tuple[str, ...], words: str) -> None:
    assert any(words in reason for reason in reasons(*rest, policy=policy))


def test_recurrent_layers_do_not_forget_drafts(tmp_path: Path) -> None:
    config = Qwen3NextConfig(**{**SMALL, "head_dim": 32}, layer_types=["linear_attention", "full_attention"] * 2)
    given = {"model": str(model(tmp_path, config)), "policy": "quest:rectify=8:verify,dense_layers=0"}
    assert any("layers of type linear_attention would not" in reason for reason in reasons(**given))
