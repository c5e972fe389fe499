"""The cache specification in vLLM's own machinery, and a manager that publishes no block a sparse step wrote."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from saccade import Policy, ServingError
from saccade.adapters.vllm import clean
from saccade.adapters.vllm.cache_spec import CleanPrefixManager, SaccadeAttentionSpec, register_cache_spec
from saccade.checkpoints.bundled import model_path
from saccade.types import ModelShape

BLOCK = 4
LAYER = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
PAGE = BLOCK * 2 * 2 * 8 * 2
QUEST, RECTIFIED = "quest:budget=16", "quest:budget=16,rectify=5"


@pytest.fixture(autouse=True)
def _registered() -> None:
    init_none_hash(sha256)
    register_cache_spec()


@cache
def config() -> Any:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "block_size": BLOCK, "max_num_seqs": 4}
    return EngineArgs(model=str(model_path()), max_num_batched_tokens=64, **settings).create_engine_config()


@pytest.mark.parametrize("policy", ["resa:min_pages=2", "tidal:budget=9,reselect=2", "streaming:budget=7,sinks=2"])
def test_covered_length_is_the_last_that_is_covered(policy: str) -> None:
    selector = Policy.from_spec(policy).plan(ModelShape(4, 4, 2, 8)).selector
    covered = clean.covered_length(selector, 3000)
    assert selector is not None and 0 < covered < 3000 and not selector.covers(covered + 1)
    assert all(selector.covers(length) for length in range(1, covered + 1))
    for limit in (1, covered, covered + 1):
        assert clean.covered_length(None, limit) == limit
        assert clean.covered_length(selector, limit) == min(limit, covered)


def test_spec_keeps_the_layer_and_makes_room_behind_the_keys() -> None:
    spec = SaccadeAttentionSpec.of(replace(LAYER, max_tp_shards=2), RECTIFIED, 96, covered=16)
    assert (spec.num_kv_heads, spec.head_size, spec.dtype, spec.max_tp_shards) == (2, 8, torch.bfloat16, 2)
    assert (spec.unpadded_page_size_bytes, spec.page_size_padded, spec.page_size_bytes) == (PAGE, PAGE + 96, PAGE + 96)
    assert (spec.policy, spec.covered, spec.extra_page_bytes) == (RECTIFIED, 16, 96)
    bare = SaccadeAttentionSpec.of(LAYER, QUEST, covered=0)
    assert (bare.page_size_padded, bare.page_size_bytes, bare.extra_page_bytes) == (None, PAGE, 0)
    assert SaccadeAttentionSpec.of(replace(LAYER, page_size_padded=PAGE + 64), QUEST, covered=0).extra_page_bytes == 64
    assert spec.max_memory_usage_bytes(config()) == 512 // BLOCK * (PAGE + 96)


def refused() -> Iterator[tuple[KVCacheSpec, str]]:
    sizes = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    yield SlidingWindowSpec(**sizes, sliding_window=64), "sees a window of 64 tokens"
    yield FullAttentionSpec(**sizes, sliding_window=32), "sees a window of 32 tokens"
    yield FullAttentionSpec(**sizes, attention_chunk_size=16), "chunks of 16 tokens"
    yield ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=16), "chunks of 16 tokens"
    yield MLAAttentionSpec(**{**sizes, "num_kv_heads": 1}), "a cache of kind mla_attention"
    yield RSWASpec(**sizes, rswa_window=16), "a cache of kind full_attention"
    yield MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,)), "a cache of kind mamba"
    yield FullAttentionSpec(**sizes, non_causal=True), "not causal"
    yield FullAttentionSpec(**sizes, head_size_v=4), "values of a layer are 4 wide, its keys 8"
    yield FullAttentionSpec(**sizes, tokens_per_state=2), "packs its cache"
    yield FullAttentionSpec(**sizes, num_head_slots=2), "packs its cache"


@pytest.mark.parametrize(("spec", "reason"), list(refused()))
def test_layers_that_are_refused(spec: KVCacheSpec, reason: str) -> None:
    with pytest.raises(ServingError, match=reason) as error:
        SaccadeAttentionSpec.of(spec, QUEST, covered=0)
    assert "\n" not in str(error.value)


def test_a_window_as_wide_as_the_longest_row_is_full_attention() -> None:
    windowed = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64)
    for longest in (63, 64):
        spec = SaccadeAttentionSpec.of(windowed, QUEST, 96, covered=16, longest=longest)
        assert spec == SaccadeAttentionSpec.of(LAYER, QUEST, 96, covered=16) and spec.sliding_window is None
    for longest in (0, 65):
        with pytest.raises(ServingError, match="a window of 64 tokens"):
            SaccadeAttentionSpec.of(windowed, QUEST, 96, covered=16, longest=longest)


def test_spec_survives_the_way_to_the_workers_and_back() -> None:
    spec = SaccadeAttentionSpec.of(LAYER, RECTIFIED, 96, covered=16)
    for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert twin == spec and type(twin) is SaccadeAttentionSpec and hash(twin) == hash(spec)


@pytest.mark.parametrize("block", [1, 8])
def test_room_grows_and_shrinks_with_the_block(block: int) -> None:
    resized = SaccadeAttentionSpec.of(LAYER, QUEST, 96, covered=16).copy_with_new_block_size(block)
    assert (resized.block_size, resized.policy, resized.covered) == (block, QUEST, 16)
    assert resized.page_size_bytes == (PAGE + 96) * block // BLOCK
    assert SaccadeAttentionSpec.of(LAYER, QUEST, 98, covered=16).copy_with_new_block_size(1).extra_page_bytes == 25
    assert SaccadeAttentionSpec.of(LAYER, QUEST, covered=16).copy_with_new_block_size(block).page_size_padded is None


def test_merge() -> None:
    """Stock's specs are as they were, beside ours."""
    assert KVCacheSpecRegistry.get_manager_class(LAYER) is FullAttentionManager
    spec = SaccadeAttentionSpec.of(LAYER, QUEST, 96, covered=16)
    assert KVCacheSpecRegistry.get_manager_class(spec) is CleanPrefixManager
    assert spec.is_uniform_with_collection({"a": spec, "b": LAYER})
    assert SaccadeAttentionSpec.merge([spec, copy.deepcopy(spec)]) == spec
    given = ((RECTIFIED, 96, 16), (QUEST, 96, 17), (QUEST, 32, 16))
    others = [SaccadeAttentionSpec.of(LAYER, policy, extra, covered=covered) for policy, extra, covered in given]
    for other in (*others, SaccadeAttentionSpec.of(replace(LAYER, num_kv_heads=1), QUEST, covered=16), LAYER):
        with pytest.raises(AssertionError):
            spec.merge([spec, other])


def test_grouping_and_memory() -> None:
    """Layers of one kind form one group, also if their heads differ; the room is part of vLLM's own budget."""
    specs = [SaccadeAttentionSpec.of(replace(LAYER, num_kv_heads=n), QUEST, 48 * n, covered=16) for n in (2, 1, 2)]
    layers = {f"layers.{number}.attn": spec for number, spec in enumerate(specs)}
    pages = (PAGE // 2 + 48) * 5
    settings = copy.deepcopy(config())
    settings.cache_config.kv_cache_layout = "LBHNC"  # the CPU backend's
    # vLLM 0.33 groups layers in a step of its own.
    grouping = getattr(core, "get_global_kv_cache_groups", None)
    groups = [] if grouping is None else [grouping(settings, [layers])]
    (worker,) = core.get_kv_cache_configs(settings, [layers], [pages * 300 + 5], *groups)
    assert worker.num_blocks == 300
    (group,) = generate_scheduler_kv_cache_config([worker]).kv_cache_groups
    assert isinstance(group.kv_cache_spec, SaccadeAttentionSpec) and sorted(group.layer_names) == sorted(layers)
    manager = KVCacheManager(generate_scheduler_kv_cache_config([worker]), 512, BLOCK, BLOCK)
    assert type(manager.coordinator.single_type_managers[0]) is CleanPrefixManager


def test_partial_tail_blocks() -> None:
    """Hashes finer than blocks publish the prompt's tail; what a session appends later is not taken for prompt."""
    spec = SaccadeAttentionSpec.of(replace(LAYER, block_size=8), QUEST, covered=0)
    pool = BlockPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=2)
    told = {"enable_caching": True, "kv_cache_group_id": 0, "scheduler_block_size": 8}
    manager = CleanPrefixManager(spec, block_pool=pool, **told)

    def request(tokens: list[int]) -> Request:
        return Request("a", tokens, SamplingParams(), None, block_hasher=get_request_block_hasher(2, sha256))

    def find(tokens: list[int]) -> int:
        hashes = request(tokens).block_hashes
        found = manager.find_longest_cache_hit(hashes, len(tokens), [0], pool, spec, False, alignment_tokens=2)
        return int(found[1])

    asked = request(list(range(11)))
    manager.allocate_new_blocks("a", 30, 30)
    manager.cache_blocks(asked, 11, replay_boundaries=())
    assert find(list(range(11))) == 10
    asked.append_output_token_ids(list(range(100, 114)))
    manager.cache_blocks(asked, 25, replay_boundaries=())
    assert find(list(asked.all_token_ids)) == 10
    asked.num_prompt_tokens = 25
    manager.cache_blocks(asked, 25, replay_boundaries=())
    assert find(list(asked.all_token_ids)) == 10
