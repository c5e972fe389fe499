"""After a dense pass the cache holds what a dense prefill of the same tokens writes; page bounds what the keys say."""

from typing import Any

import pytest
import torch
from engines import Engines, core, greedy, prompt_of, prompts, runner
from torch import Tensor
from vllm import LLM

from conftest import VISIT
from walking import among, walk

POLICIES = (
    "streaming:budget=64,rectify=4",
    "quest:budget=64,rectify=8",
    "resa:min_pages=2,ratio=0.05,rectify=16",
    "tidal:budget=64,reselect=7,heads=query,rectify=8",
    "less_is_more:budget=64,reselect=7,rectify=5",
    "lychee_decode:budget=64,roles=every:4,rectify=8",
    "lychee_cluster:budget=64,rectify=8",
)
LENGTHS = (300, 87, 210)


def keys_and_values(engine: LLM, request: Any, slots: int) -> Tensor:
    """What the cache holds for the first `slots` slots of a running request, `[L, 2, slots, Hkv, d]`."""
    blocks = core(engine).scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    layers = []
    for cache in runner(engine).kv_caches:
        held = cache[blocks]
        count, heads, block, width = held.shape
        halves = held.reshape(count, heads, 2, block * width // 2)
        k = halves[:, :, 0].view(count, heads, width // 2, block).permute(0, 3, 1, 2)
        v = halves[:, :, 1].view(count, heads, block, width // 2).permute(0, 2, 1, 3)
        layers.append(torch.stack([part.reshape(count * block, heads, width // 2)[:slots] for part in (k, v)]))
    return torch.stack(layers)


def running(engine: LLM, name: str) -> Any:
    requests = core(engine).scheduler.requests
    return next(request for key, request in requests.items() if key.startswith(name))


@pytest.mark.parametrize("policy", among(POLICIES, (*POLICIES[:3], *POLICIES[5:])))
def test_the_cache_is_that_of_a_dense_prefill(policy: str, visited: LLM) -> None:
    """Three requests in one batch; all layers; float32, 1e-5. Between two passes the cache is another one."""
    every = int(policy.rpartition("rectify=")[2])
    inner = visited.llm_engine
    for number, prompt in enumerate(prompts(*LENGTHS)):
        inner.add_request(str(number), prompt_of(prompt), greedy(90))
    seen: list[tuple[list[int], int, Tensor]] = []
    for step in range(46):
        inner.step()
        if step < 20 or step % 9:
            continue
        for number, length in enumerate(LENGTHS):
            request = running(visited, str(number))
            held = request.num_computed_tokens
            clean = length + (held - length) // (every + 1) * (every + 1)
            seen.append((list(request.all_token_ids)[:held], clean, keys_and_values(visited, request, held)))
    inner.abort_request(map(str, range(len(LENGTHS))))
    differing = 0
    for place, (tokens, clean, written) in enumerate(seen):
        inner.add_request(f"dense {place}", prompt_of(tokens), greedy(9))
        inner.step()
        expected = keys_and_values(visited, running(visited, f"dense {place}"), len(tokens))
        inner.abort_request([f"dense {place}"])
        torch.testing.assert_close(written[:, :, :clean], expected[:, :, :clean], atol=1e-5, rtol=1e-5)
        beyond = (written[:, :, clean:] - expected[:, :, clean:]).abs().amax() if clean < len(tokens) else 0
        differing += bool(beyond > 1e-3)
    assert differing, "sparse steps wrote what dense ones write: this shows nothing about the passes"


@pytest.mark.parametrize(
    ("policy", "page", "block"),
    [
        (POLICIES[1], 16, 32),
        pytest.param("quest:budget=64,page=16,rectify=6", 16, 16, marks=walk),
        pytest.param("quest:budget=64,page=32,rectify=6", 32, 64, marks=walk),
    ],
)
def test_page_bounds_are_those_of_the_keys(policy: str, page: int, block: int, all_engines: Engines) -> None:
    """After prefill in chunks, decoding and rectification, of the full pages of running requests; exactly."""
    engine = all_engines.visit(policy, **VISIT, **({} if block == 32 else {"block_size": block}))
    inner = engine.llm_engine
    for number, prompt in enumerate([*prompts(*LENGTHS), *prompts(*LENGTHS)]):
        inner.add_request(str(number), prompt_of(prompt), greedy(90))
    for _ in range(45):
        inner.step()
    attention = next(iter(runner(engine).compilation_config.static_forward_context.values())).impl
    bounds = attention.serving.indexes.layers
    assert sorted(bounds) == list(range(2, 12)), "dense layers keep no bounds"
    for number in range(2 * len(LENGTHS)):
        request = running(engine, str(number))
        length = request.num_computed_tokens
        keys = keys_and_values(engine, request, length)[:, 0]
        blocks = core(engine).scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        for layer, held in bounds.items():
            for place in range(length // page):
                tokens = keys[layer, place * page : (place + 1) * page]
                at = blocks[place * page // block], slice(None), place * page % block // page
                assert torch.equal(held.lower[at], tokens.amin(0)), (layer, place)
                assert torch.equal(held.upper[at], tokens.amax(0)), (layer, place)
    inner.abort_request(map(str, range(2 * len(LENGTHS))))
