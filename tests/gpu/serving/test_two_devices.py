"""Tensor parallelism over two CUDA devices: every rank chooses what one device chooses, in captured steps."""

from __future__ import annotations

import torch
from cuda_engines import CudaEngines, Request, Truth, distance_shown, say, shown

POLICIES = ["less_is_more:budget=256,reselect=7", "quest:budget=256", "lychee_decode:budget=256,roles=every:4"]
REQUESTS = [Request("long", 0, 1500, 32), Request("off", 5000, 700, 24, sparse=False), Request("short", 9000, 90, 40)]


def test_two_ranks_give_the_log_probabilities_of_one_device(engines: CudaEngines) -> None:
    """At most twice as far from float32 as stock vLLM on two devices and our adapter on one, all in float16."""
    truth = Truth()
    found = shown(engines.make(None, tensor_parallel_size=2), REQUESTS)
    stock = {one.name: distance_shown(found[one.name], truth.logits("dense", one)) for one in REQUESTS}
    failed = []
    for policy in POLICIES:
        found = shown(engines.make(policy, tensor_parallel_size=2), REQUESTS)
        for request in REQUESTS:
            exact, half = truth.logits(policy, request), truth.logits(policy, request, torch.float16)
            best = [
                {int(token): float(step[token]) for token in step.topk(20).indices} for step in half.log_softmax(-1)
            ]
            allowed = 2 * max(stock[request.name], distance_shown(best, exact))
            far = distance_shown(found[request.name], exact)
            say(f"two ranks, {policy} {request.name}: {far:.4f} of {allowed:.4f}")
            if far > allowed:
                failed.append((policy, request.name))
    assert not failed
