"""Captured decoding steps on a CUDA device: the logits of given tokens, in batches that grow, shrink and are padded.

float16 rounds at every layer, and rounding may move a token into a set or out of it. How far that carries logits is
measured on stock vLLM and on the transformers adapter, both in float16, against float32 on the same tokens: our engines
may be twice as far, for two roundings (of what chooses, and of what is computed) against one.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engines import (
    DEVICE,
    CudaEngines,
    GivenTokens,
    Request,
    Truth,
    begin,
    core,
    distance,
    feed,
    finish,
    logits_of,
    name_of,
    runner,
    say,
    scheduled,
)
from vllm.config import CUDAGraphMode

from own_index import MODULE, NAMES
from own_method import installed
from saccade.adapters.vllm.worker.backend import SparseLayer

LESS_IS_MORE, QUEST = "less_is_more:budget=256,reselect=7", "quest:budget=256"
CLUSTER = "lychee_cluster:budget=256"
POLICIES = [LESS_IS_MORE, QUEST, CLUSTER, "lychee_decode:budget=256,roles=every:4", "streaming:budget=256"]
# Three and five rows replay graphs of four and eight; lengths around the budget; one opts out.
REQUESTS = [
    Request("long", 0, 1500, 40),
    Request("covered", 3000, 90, 64),
    Request("off", 5000, 700, 32, sparse=False),
    Request("grows", 7000, 240, 56),
    Request("short", 9000, 33, 24),
]


MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "eager": {"enforce_eager": True},
}


@pytest.fixture(scope="module")
def stock_distance(truth: Truth) -> dict[str, float]:
    """How far stock vLLM in float16 is from float32, by request."""
    engines = CudaEngines()
    found = feed(engines.make(None), REQUESTS)
    engines.close()
    return {one.name: distance(found[one.name], truth.logits("dense", one)) for one in REQUESTS}


def kernels() -> dict[str, int]:
    """Compiled variants of this package's Triton kernels, by name."""
    from triton.runtime.jit import JITFunction

    gc.unfreeze()  # vLLM hides from the collector what it has made by the end of its start
    return {
        f"{held.fn.__module__}.{held.fn.__name__}": sum(len(cache[0]) for cache in held.device_caches.values())
        for held in gc.get_objects()
        if isinstance(held, JITFunction) and getattr(held.fn, "__module__", "").startswith("saccade.")
    }


def replays(engine: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every full graph that is replayed from now on."""
    manager, seen = runner(engine).cudagraph_manager, list[int]()
    run = manager.run_fullgraph

    def watched(desc: Any) -> Any:
        seen.append(desc.num_reqs)
        return run(desc)

    patch.setattr(manager, "run_fullgraph", watched)
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_those_of_the_transformers_adapter(
    policy: str, engines: CudaEngines, truth: Truth, stock_distance: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured, piecewise and eager; in captured steps no kernel is compiled once the engine has started."""
    expect_those_of_transformers(policy, MODES, engines, truth, stock_distance, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_an_index_that_is_not_ours_is_captured(
    name: str,
    tmp_path: Path,
    engines: CudaEngines,
    truth: Truth,
    stock_distance: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with installed(tmp_path, MODULE, POSITIVE=NAMES[0], STOPS=NAMES[1]):
        policy, captured = f"{name}:budget=256", {"captured": MODES["captured"]}
        expect_those_of_transformers(policy, captured, engines, truth, stock_distance, monkeypatch)
        engines.close()


def expect_those_of_transformers(
    policy: str,
    modes: dict[str, dict[str, Any]],
    engines: CudaEngines,
    truth: Truth,
    stock_distance: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for mode, settings in modes.items():
        engine = engines.make(policy, **settings)
        wanted = {"captured": "FULL_AND_PIECEWISE", "piecewise": "PIECEWISE", "eager": "NONE"}[mode]
        assert core(engine).vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode[wanted]
        seen = replays(engine, monkeypatch)
        before = kernels()
        found[mode] = feed(engine, REQUESTS)
        if mode == "captured":
            assert {8, 4, 2, 1} <= set(seen), "batches of five, four, three, two and one row"
            assert sum(before.values()) > 0
            assert kernels() == before, "a kernel was compiled after the start"
        else:
            assert not seen
    for request in REQUESTS:
        exact = truth.logits(policy, request)
        ours = truth.logits(policy, request, torch.float16)
        allowed = 2 * max(stock_distance[request.name], distance(ours, exact))
        for mode, logits in found.items():
            far = distance(logits[request.name], exact)
            say(f"{policy} {mode} {request.name}: {far:.4f} of {allowed:.4f}")
            assert far <= allowed


@pytest.mark.parametrize("policy", [QUEST, CLUSTER])
def test_model_runner_v1_replays_the_same_graph(
    policy: str, engines: CudaEngines, truth: Truth, stock_distance: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    engine = engines.make(policy, async_scheduling=False)
    assert not core(engine).vllm_config.use_v2_model_runner
    modes = []
    forward = SparseLayer.forward
    monkeypatch.setattr(SparseLayer, "forward", lambda *given, **more: modes.append(1) or forward(*given, **more))  # type: ignore[func-returns-value]
    found = feed(engine, REQUESTS)
    # Layers run in Python in steps with prompts alone: decoding is replayed.
    assert len(modes) < 12 * len(REQUESTS) * 4
    for request in REQUESTS:
        exact = truth.logits(policy, request)
        ours = truth.logits(policy, request, torch.float16)
        far = distance(found[request.name], exact)
        say(f"V1 {request.name}: {far:.4f}")
        assert far <= 2 * max(stock_distance[request.name], distance(ours, exact))


def expect(request: Request, found: torch.Tensor, policy: str, truth: Truth, stock: dict[str, float]) -> None:
    """What a batch has answered is what the policy says of the request alone, in the transformers adapter."""
    exact = truth.logits(policy, request)
    allowed = 2 * max(stock["long"], distance(truth.logits(policy, request, torch.float16), exact))
    far = distance(found, exact)
    say(f"{request.name}: {far:.4f} of {allowed:.4f}")
    assert far <= allowed


@pytest.mark.parametrize("policy", [QUEST, CLUSTER])
def test_a_second_turn_hits_the_prefix_cache(
    policy: str, engines: CudaEngines, truth: Truth, stock_distance: dict[str, float]
) -> None:
    """What sparse steps wrote is not reused, what was prompt is; the answer is that of a request without hits."""
    engine = engines.make(policy, enable_prefix_caching=True)
    first = Request("first", 0, 1500, 40)
    feed(engine, [first])
    second = Request("second", 0, 1700, 40)
    begin(engine, second)
    hit = None
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            hit = output.num_cached_tokens
    assert hit is not None
    assert 1400 <= hit <= 1500
    expect(second, logits_of(second), policy, truth, stock_distance)


@pytest.mark.parametrize("policy", [QUEST, CLUSTER])
def test_preempted_rows_go_on(
    policy: str, engines: CudaEngines, truth: Truth, stock_distance: dict[str, float]
) -> None:
    """A cache too small for all: some lose their blocks and are computed anew, the others answer as alone."""
    engine = engines.make(policy, num_gpu_blocks_override=200, max_model_len=2048)
    requests = [Request(f"row {number}", 2000 * number, 700, 120) for number in range(4)]
    preempted: list[str] = []
    scheduler = core(engine).scheduler
    preempt = scheduler._preempt_request

    def watched(request: Any, *rest: Any, **more: Any) -> None:
        preempted.append(name_of(request))
        preempt(request, *rest, **more)

    scheduler._preempt_request = watched
    found = feed(engine, requests)
    assert preempted
    kept = [request for request in requests if request.name not in preempted]
    assert kept
    for request in kept:
        expect(request, found[request.name], policy, truth, stock_distance)
    for name in set(preempted):
        assert bool(torch.isfinite(found[name]).all())


@pytest.mark.parametrize("policy", [LESS_IS_MORE, CLUSTER])
def test_aborted_requests_leave_no_trace(
    policy: str, engines: CudaEngines, truth: Truth, stock_distance: dict[str, float]
) -> None:
    """Twelve streams over eight rows, four of them cut off while they decode: the others answer as alone."""
    engine = engines.make(policy)
    requests = [Request(f"row {number}", 900 * number, 300 + 90 * number, 40) for number in range(12)]
    for request in requests:
        begin(engine, request)
    cut = [request.name for request in requests[1::3]]
    for step in range(10**6):
        if step == 12:
            engine.llm_engine.abort_request(cut[:2])
        if step == 30:
            engine.llm_engine.abort_request(cut[2:])
        if not engine.llm_engine.has_unfinished_requests():
            break
        engine.llm_engine.step()
    for request in requests:
        if request.name not in cut:
            expect(request, logits_of(request), policy, truth, stock_distance)


def test_rectified_keys_are_those_of_a_dense_prefill(engines: CudaEngines) -> None:
    """Behind a dense pass the cache of a request holds what a prompt of the same tokens would have written."""
    engine = engines.make("resa:min_pages=4,ratio=0.1,rectify=16")
    sparse, dense = Request("sparse", 0, 600, 60), Request("dense", 0, 660, 2)
    held = {}
    manager = core(engine).scheduler.kv_cache_manager
    layers = core(engine).vllm_config.compilation_config.static_forward_context
    for request, stop in ((sparse, 600 + 55), (dense, 660)):
        begin(engine, request)
        while not any(name == request.name and length >= stop for name, length in GivenTokens.logits):
            engine.llm_engine.step()
        (blocks,) = manager.get_block_ids(scheduled(engine, request.name).request_id)
        chosen = torch.tensor(blocks, device=DEVICE)
        held[request.name] = [
            torch.cat([part[chosen].flatten(0, 1).float().cpu() for part in (kv.k, kv.v)], dim=-1)
            for kv in (layer.impl.view(layer, layer.kv_cache, None) for layer in layers.values())
        ]
        engine.llm_engine.abort_request([request.name])
        finish(engine)
    # Whole phases of 17 tokens behind the prompt are clean: three of them after 55 tokens.
    clean = 600 + 3 * 17
    for number, (one, other) in enumerate(zip(held["sparse"], held["dense"], strict=True)):
        for stretch in (slice(0, 600), slice(600, clean)):
            error = (one[stretch] - other[stretch]).square().mean().sqrt() / other[stretch].square().mean().sqrt()
            say(f"layer {number} {stretch}: {float(error):.5f}")
            # Rounded to 11 bits in every layer below, in other orders of summation.
            assert float(error) <= 2.0**-11 * (2 + number)
