"""The CUDA backend on CPU tensors: vLLM's own layers and classes, FlashAttention by its documented semantics."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engine import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, SCALE, CudaEngine, Row, mixed_roles
from cuda_requests import CLUSTERS, MIXED_PAGES, PAGES, REUSED_PAGES, Requests
from engines import force_own_path
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from host_reads import watching
from saccade.adapters.vllm.worker import room
from saccade.adapters.vllm.worker.cuda import SaccadeFlashBackend, SaccadeFlashBuilder
from saccade.adapters.vllm.worker.mixed_step import prepare
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.errors import ServingError


@pytest.mark.parametrize(
    ("policy", "block", "layout"),
    [
        (PAGES, 16, "LBNHC"),
        (PAGES, 32, "LBHNC"),
        (PAGES + ",heads=query", 16, "BLNHC"),
        ("resa:min_pages=2,ratio=0.05,rectify=none", 16, "LBHNC"),
        (REUSED_PAGES, 16, "BLHNC"),
        ("composed:scorer=exact,page=32,budget=96,roles=layers:2+6", 16, "LHBNC"),
        (MIXED_PAGES, 32, "LBNHC"),
        ("streaming:budget=64", 16, "LBNHC"),
        ("tidal:rule=top_p,top_p=0.9,budget=128,reselect=7,heads=query", 16, "LBHNC"),
        ("tidal:rule=threshold,threshold=0.01,reselect=7", 16, "LBNHC"),
        ("less_is_more:budget=64,reselect=7", 16, "BLNHC"),
        ("lychee_decode:budget=64,roles=every:4", 16, "LBNHC"),
        (CLUSTERS, 16, "BLHNC"),
        ("lychee_cluster:form=paper,budget=64,chunking=fixed", 32, "LBHNC"),
        ("dense", 16, "LBNHC"),
    ],
)
def test_every_row_gets_what_the_policy_says(
    policy: str, block: int, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy.format(roles=mixed_roles(tmp_path))
    force_own_path(monkeypatch)
    engine = CudaEngine(monkeypatch, policy, block=block, layout=layout)
    Requests(engine).run_mixed()


@pytest.mark.parametrize(("policy", "captured"), [(PAGES, True), (CLUSTERS, True), (CLUSTERS, False)])
def test_rows_that_the_budget_covers_go_to_the_parent_unless_steps_are_captured(
    policy: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not captured:
        # No memory for an index that stays.
        monkeypatch.setattr(room.current_platform, "get_device_total_memory", lambda: 0)
    engine = CudaEngine(monkeypatch, policy)
    requests = Requests(engine)
    requests.run([Row(0, 63, 63, True), Row(1, 90, 90, True)])
    for length in (64, 65, 66):
        rows = [Row(0, length), Row(1, 27 + length), Row(2, 2 * (length - 63), 2, True)]
        part = engine.prepared(engine.metadata(rows)).part(LAYERS - 1)
        assert part.parent.seq_lens.shape[0] == (1 if length > 64 or captured else 2)
        requests.run(rows)


def test_dense_layers_of_a_mixed_step_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    engine.requests.rows[2] = RequestRow(sparse=False)
    common = engine.metadata([Row(1, 130, 65, True), Row(2, 103), Row(0, 152), Row(3, 99)])
    step = engine.builder.build(0, common)
    # Layers whose heads are all dense are vLLM's, for all rows.
    for layer in (0, 1):
        dense = step.part(layer)
        assert (dense.parent_tokens, dense.sparse) == (None, None)
        assert dense.parent.seq_lens.tolist() == [130, 103, 152, 99]
    assert step.part(2) == step.part(LAYERS - 1)


@pytest.mark.parametrize(
    ("policy", "wanted"), [(PAGES, [(2, True), (1, False)]), ("quest:budget=64,page=16,dense_layers=0", [(1, False)])]
)
def test_a_steps_second_metadata_is_made_without_a_schedule(
    policy: str, wanted: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which FLASH_ATTN has memory for one, where steps are captured; and none is made where no layer asks for it."""
    engine, built = CudaEngine(monkeypatch, policy), []

    def build(_: Any, prefix: int, common: Any, fast: bool) -> None:
        built.append((common.num_reqs, fast))

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    engine.prepared(engine.metadata([Row(0, 152), Row(3, 9, 9, True)]))
    assert built == wanted


def test_a_step_without_decoding_rows_is_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    common = engine.metadata([Row(0, 152, 152, True), Row(3, 1, 1, True)])
    seen = []
    step = prepare(engine.builder.sparse, common, lambda given, _: seen.append(given) or "parent")  # type: ignore[func-returns-value]
    assert seen == [common]
    part = step.part(0)
    assert (part.parent, part.parent_tokens, part.sparse) == ("parent", None, None)


def test_rows_without_tokens_belong_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    part = engine.prepared(engine.metadata([Row(0, 152), Row(3, 9, 9, True), Row(1, 0, 0)])).part(2)
    assert part.parent.seq_lens.tolist() == [9]
    assert (part.sparse.tokens, part.parent_tokens) == (slice(0, 1), slice(1, 10))


@pytest.mark.parametrize(
    ("order", "copied"), [([0, 1, 2], False), ([2, 0, 1], False), ([0, 2, 1], True)], ids=["sorted", "first", "between"]
)
def test_a_prompt_is_copied_only_between_rows_that_decode(
    order: list[int], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM sorts a batch, layers read and write its tokens where they are; the answers are those of any order."""
    torch.manual_seed(0)
    engine = CudaEngine(monkeypatch, PAGES)
    for layer in engine.layers:
        layer.use_direct_call = True  # or nobody sees what happens in it
    engine.run(Row(0, 150, 150, True), Row(1, 99, 99, True))
    rows, before = [Row(0, 151), Row(1, 100), Row(2, 70, 70, True)], [0, 1, 2, 72]
    qkv, where = engine.random_qkv(72), [slice(*before[row : row + 2]) for row in order]
    common = engine.metadata([rows[row] for row in order])
    step = engine.builder.build(0, common)
    with watching() as watched:
        moved = [tuple(torch.cat([one[span] for span in where]) for one in layer) for layer in qkv]
        found = engine.layers_of(step, common, moved)
    names = {name for name, _ in watched.shapes}
    assert names & {"index_select", "index_copy_"} == ({"index_select", "index_copy_"} if copied else set())
    edges = [0, *accumulate(span.stop - span.start for span in where)]
    for out, wanted in zip(found, engine.step(rows, qkv), strict=True):
        for place, span in enumerate(where):
            assert torch.equal(out[edges[place] : edges[place + 1]], wanted[span])


def test_a_profiling_run_has_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    common = engine.metadata([Row(0, 5, 5, True)])
    for out in engine.layers_of(None, common, engine.random_qkv(5)):
        assert not out.any()
    assert not engine.serving.indexes.layers


def test_what_vllm_asks_of_the_backend() -> None:
    assert SaccadeFlashBackend.get_name() == "CUSTOM"
    assert SaccadeFlashBackend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert not SaccadeFlashBackend.forward_includes_kv_cache_update
    # Else a model of vLLM 0.33 calls without keys.
    assert not SaccadeFlashBackend.supports_kv_cache_update_bypass
    assert not SaccadeFlashBuilder.supports_update_block_table


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"alibi_slopes": [0.5] * QUERY_HEADS}, "ALiBi"),
        # What is planned for heads that are not there picks for the wrong ones, and answers.
        ({"num_kv_heads": QUERY_HEADS}, f"a layer has {QUERY_HEADS} KV heads, its configuration says {KV_HEADS}"),
    ],
)
def test_layers_of_another_kind_are_refused(
    setting: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    with set_current_vllm_config(engine.config), pytest.raises(ServingError, match=reason):
        Attention(
            QUERY_HEADS,
            HEAD_DIM,
            SCALE,
            cache_config=engine.config.cache_config,
            prefix="model.layers.99.self_attn.attn",
            attn_backend=SaccadeFlashBackend,
            **{"num_kv_heads": KV_HEADS, **setting},
        )
