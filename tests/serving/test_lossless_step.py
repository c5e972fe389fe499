"""What graphs of a lossless engine on CUDA hold: a draft that is renewed on the device, and a pass that verifies."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_engine import HEAD_DIM, MAX_LEN, CudaEngine, Row
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from saccade.adapters.vllm.lossless import WORKER, speculation
from saccade.adapters.vllm.options import drafting
from saccade.adapters.vllm.worker import backend
from saccade.adapters.vllm.worker.cuda import SaccadeFlashBuilder
from saccade.adapters.vllm.worker.room import room_of
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.checkpoints.bundled import model_path

pytestmark = pytest.mark.usefixtures("runner_v2")
DRAFTS = 3
PAGES, PUBLISHED = "quest:budget=64,page=16", "less_is_more:budget=64,reselect=7"
INDEXES = "token_clusters:budget=64,sinks=4", "lychee_cluster:budget=64,sinks=4,buffer=16"


def made(monkeypatch: pytest.MonkeyPatch, policy: str, cache: str = "auto") -> CudaEngine:
    """Its builder is the target's; two of four requests have a prompt in the cache."""
    torch.manual_seed(0)
    speculative = speculation(str(model_path()), DRAFTS, fixed=True)
    settings = {"worker_cls": WORKER, "speculative_config": speculative, "max_num_seqs": 4}
    engine = CudaEngine(monkeypatch, f"{policy},rectify={DRAFTS}:verify", cache=cache, settings=settings)
    for slot, prompt in enumerate((158, 108)):
        engine.requests.rows[slot].certain = prompt
    engine.step([Row(0, 158, 158, True), Row(1, 108, 108, True)], engine.random_qkv(266))
    return engine


def draft_builder(engine: CudaEngine) -> SaccadeFlashBuilder:
    return SaccadeFlashBuilder(engine.spec, engine.names, drafting(engine.config), engine.device)


def padded(engine: CudaEngine, rows: Sequence[Row], tokens: int) -> Any:
    """Metadata of rows, of which the last has no tokens and stands for so many."""
    common = engine.metadata([*rows, Row(2, 0, 0)])
    common.num_actual_tokens += tokens
    common.slot_mapping = torch.cat((common.slot_mapping, common.slot_mapping.new_full((tokens,), -1)))
    return common


@pytest.mark.parametrize("policy", [PAGES, PUBLISHED, *INDEXES])
def test_a_draft_renewed_in_place_is_one_made_anew(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over three drafts, the third of which falls into another page; layers that are vLLM's are renewed by vLLM."""
    answers, counts, parents = list[list[Tensor]](), [], list[Any]()
    stock = FlashAttentionMetadataBuilder.update_draft_decode_metadata

    def update(one: Any, parent: Any) -> None:
        parents.append(parent)
        stock(one, parent)

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "update_draft_decode_metadata", update)
    for renews in (False, True):
        engine = made(monkeypatch, policy)
        builder, step, answers = draft_builder(engine), None, [*answers, []]
        common = padded(engine, [Row(0, 159), Row(1, 109)], 1)
        common.max_seq_len = MAX_LEN
        for number in range(DRAFTS):
            if number:
                common.seq_lens[:2] += 1
                rows = [Row(slot, int(length)) for slot, length in enumerate(common.seq_lens[:2])]
                common.slot_mapping[:2] = engine.metadata(rows).slot_mapping
            if step is None or not renews:
                step = builder.build(0, common)
            else:
                builder.update_draft_decode_metadata(step)
                assert parents[-1] is step.dense
            assert [(one.start, one.count) for one in step.written] == [(None, 0)] * (policy == PAGES)
            answers[-1] += [out[:2] for out in engine.layers_of(step, common, engine.random_qkv(3))]
        counts.append(engine.serving.counters.totals())
    assert len(parents) == DRAFTS - 1 and all(map(torch.equal, *answers))
    assert counts[0] == counts[1] and all(steps == 2 * DRAFTS for *_, steps in counts[0]), "padding is counted"


@pytest.mark.parametrize("policy", [PAGES, PUBLISHED])
def test_both_builders_say_what_graphs_hold(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(monkeypatch, policy)
    told = drafting(engine.config)
    supports = [SaccadeFlashBuilder.get_cudagraph_support(config, engine.spec) for config in (engine.config, told)]
    assert supports == [AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE]
    renew = [builder.supports_draft_decode_metadata_update for builder in (engine.builder, draft_builder(engine))]
    assert renew == [False, True]


def test_what_verifies_stays_where_it_is_and_bounds_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts have widened bounds, and pages are full once they are verified; a prompt beside them is another step."""
    engine = made(monkeypatch, PAGES)
    builder = draft_builder(engine)
    for number in range(DRAFTS):
        common = engine.metadata([Row(0, 159 + number), Row(1, 109 + number)])
        engine.layers_of(builder.build(0, common), common, [(q, 9 * k, v) for q, k, v in engine.random_qkv(2)])
    places = []
    for lengths in ((159, 109), (162, 112)):
        common = padded(engine, [Row(slot, length, DRAFTS + 1) for slot, length in enumerate(lengths)], DRAFTS + 1)
        step = engine.builder.build(0, common)
        (written,) = step.written
        assert written.start.tolist() == [lengths[0] - DRAFTS - 1, lengths[1] - DRAFTS - 1, 0]
        assert written.rows.page_table.data_ptr() == common.block_table_tensor.data_ptr()
        assert written.count == DRAFTS + 1
        assert step.part(0).parent is step.part(11).parent is step.parent
        places.append((written.start.data_ptr(), written.rows.row_start.data_ptr()))
    assert places[0] == places[1]
    engine.layers_of(step, common, engine.random_qkv(3 * (DRAFTS + 1)))
    expect_bounds(engine, {0: 160, 1: 112})
    common = engine.metadata([Row(0, 163), Row(1, 116, DRAFTS + 1), Row(2, 64, 64, True)])
    step = engine.builder.build(0, common)
    assert [written.count for written in step.written] == [64], "on the host one token waits until its page is full"
    engine.layers_of(step, common, engine.random_qkv(1 + DRAFTS + 1 + 64))
    expect_bounds(engine, {0: 160, 1: 112, 2: 64})


def test_an_index_takes_in_what_stands_for_sure_and_never_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host counts drafts before it knows of them: of two cycles that it takes to stand, one token each does."""
    for policy in INDEXES:
        engine = made(monkeypatch, policy)
        index: Any = room_of(engine.config).index
        builder, trees = draft_builder(engine), index.trees
        ends, places = [], set[int]()
        for cycle in range(4):
            first = 158 + cycle * (DRAFTS + 1)
            if cycle:
                common = engine.metadata([Row(0, first, DRAFTS + 1)])
                engine.layers_of(engine.builder.build(0, common), common, engine.random_qkv(DRAFTS + 1))
            common = padded(engine, [Row(0, first + 1)], 1)
            builder.build(0, common)
            engine.serving.attended.due = False
            ends.append(int(trees.ends[0]))
            assert index.placed[:2].tolist() == [0, engine.config.scheduler_config.max_num_seqs]
            places.add(index.placed.data_ptr())
        assert ends[0] > 128 and index.trees is trees and len(places) == 1, policy
        if index.table is None:
            # Of 158, 159, 160, 164 tokens.
            assert ends == [144, 144, 160, 160]


def expect_bounds(engine: CudaEngine, lengths: dict[int, int]) -> None:
    """Of all full pages of some requests, from the keys in the cache."""
    for number, bounds in serving_of(engine.config).indexes.layers.items():
        cache = engine.layers[number].kv_cache
        for slot, length in lengths.items():
            for block in engine.tables[slot, : length // 16].tolist():
                keys = cache[block, :, :, :HEAD_DIM]
                assert torch.equal(bounds.lower[block, :, 0], keys.amin(1))
                assert torch.equal(bounds.upper[block, :, 0], keys.amax(1))
    assert len(engine.serving.indexes.layers) == 10


def test_over_8_bits_queries_come_as_stocks_layers_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised by the compiled model, which rounds them once: vLLM's kernel takes them so, and ours their digits."""
    engine = made(monkeypatch, PUBLISHED, "fp8")
    common, drafts, asked = engine.metadata([Row(0, 159), Row(1, 109)]), engine.random_qkv(2), dict[int, Tensor]()
    ours = backend.attend
    monkeypatch.setattr(backend, "attend", lambda *got, **more: asked.update({got[1]: got[2]}) or ours(*got, **more))
    outs = engine.layers_of(draft_builder(engine).build(0, common), common, drafts)
    assert all(bool(out.isfinite().all()) for out in outs)
    # Factors differ from layer to layer.
    for number, query in asked.items():
        one = engine.layers[number]
        told = one.query_quant(drafts[number][0].flatten(1), one._q_scale)[0].float() * one._q_scale
        assert torch.equal(query, told.view_as(query))
    assert set(asked) == {*range(2, 12)}, "the first two are dense, and vLLM's"
    assert all(steps == 2 for *_, steps in engine.serving.counters.totals())
