"""Tensor parallelism over two CUDA devices: every rank chooses what one device chooses, in captured steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engines import CudaEngines, Request, Truth, distance_shown, say, shown
from test_layer_kinds_gpu import PER_KIND, saved
from test_layer_kinds_gpu import POLICIES as MIXED

POLICIES = ["less_is_more:budget=256,reselect=7", "quest:budget=256", "lychee_decode:budget=256,roles=every:4"]
REQUESTS = [Request("long", 0, 1500, 32), Request("off", 5000, 700, 24, sparse=False), Request("short", 9000, 90, 40)]


def expect_one_device(
    engines: CudaEngines, truth: Truth, policies: Sequence[str], dtype: torch.dtype, ours: dict[str, Any]
) -> None:
    """At most twice as far from float32 as stock vLLM on two devices and our adapter on one, all in `dtype`."""
    settings = {"model": str(truth.folder), "dtype": str(dtype).removeprefix("torch."), "tensor_parallel_size": 2}
    found = shown(engines.make(None, **settings), REQUESTS)
    stock = {one.name: distance_shown(found[one.name], truth.logits("dense", one)) for one in REQUESTS}
    failed = []
    for policy in policies:
        found = shown(engines.make(policy, **settings, **ours), REQUESTS)
        for request in REQUESTS:
            exact, half = truth.logits(policy, request), truth.logits(policy, request, dtype)
            best = [
                {int(token): float(step[token]) for token in step.topk(20).indices} for step in half.log_softmax(-1)
            ]
            allowed = 2 * max(stock[request.name], distance_shown(best, exact))
            far = distance_shown(found[request.name], exact)
            say(f"two ranks, {policy} {request.name}: {far:.4f} of {allowed:.4f}")
            if far > allowed:
                failed.append((policy, request.name))
    assert not failed


def test_two_ranks_give_the_log_probabilities_of_one_device(engines: CudaEngines) -> None:
    expect_one_device(engines, Truth(), POLICIES, torch.float16, {})


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_two_ranks_of_a_model_with_windows(name: str, engines: CudaEngines, tmp_path: Path) -> None:
    expect_one_device(engines, Truth(saved(tmp_path, name), "eager"), MIXED, torch.bfloat16, PER_KIND)
