"""Decoding steps that a CUDA graph can hold: in the same memory, by bounds instead of lengths, padded or not."""

import logging
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cuda_engine import HEAD_DIM, KV_HEADS, LAYERS, MAX_LEN, QUERY_HEADS, CudaEngine, Row, mixed_roles
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport

from saccade.adapters.vllm.options import held_by
from saccade.adapters.vllm.worker import room
from saccade.adapters.vllm.worker.cuda import SaccadeFlashBuilder, reasons_of
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.step import Step
from saccade.decode import recall as recall_module
from saccade.decode.recall import MeanRecall, OfRows, RecallObserver
from saccade.kernels.sparse_decode.api import sparse_decode

PAGES = "quest:budget=64,page=16,dense_layers=2"
CLUSTERS = "lychee_cluster:form=paper,budget=64"


def decode_step(engine: CudaEngine, rows: Sequence[Row]) -> Step:
    step = engine.prepared(engine.metadata(rows))
    assert step.sparse.rows.row_start.data_ptr() == engine.builder._decode_steps._starts.data_ptr()
    return step


def tensors(thing: Any) -> list[Tensor]:
    """All tensors of a dataclass, and of those in it."""
    if isinstance(thing, Tensor):
        return [thing]
    if is_dataclass(thing):
        return [found for field in fields(thing) for found in tensors(getattr(thing, field.name))]
    return [found for one in thing for found in tensors(one)] if isinstance(thing, (tuple, list)) else []


def test_dense_layers_are_vllms_and_others_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="saccade"):
        engine = CudaEngine(monkeypatch, PAGES)
    support = SaccadeFlashBuilder.get_cudagraph_support(engine.config, engine.spec)
    assert support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert [record.message for record in caplog.records] == ["saccade: decoding steps are part of CUDA graphs"]
    step = decode_step(engine, [Row(0, 152), Row(3, 9)])
    parts = [step.part(layer) for layer in range(LAYERS)]
    assert [part.parent is step.dense and part.sparse is None for part in parts] == [True] * 2 + [False] * (LAYERS - 2)
    assert all(part.parent is None and part.sparse is step.sparse for part in parts[2:])
    assert step.sparse.tokens.where == slice(2)
    assert step.dense.seq_lens.tolist() == step.sparse.rows.seq_lens.tolist() == [152, 9]


def test_what_the_graph_reads_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own tensors are persistent; all others that a step names are ours, and the same at every step."""
    engine = CudaEngine(monkeypatch, PAGES)
    common = engine.metadata([Row(0, 152), Row(3, 99), Row(1, 0, 0)])
    theirs, addresses = {common.seq_lens.data_ptr(), common.block_table_tensor.data_ptr()}, []
    for lengths in ((152, 99, 0), (301, 5, 0)):
        common.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        step = engine.prepared(common)
        named = tensors((step.sparse.rows, step.written, step.sparse.state.workspace))
        addresses.append([one for tensor in named if (one := tensor.data_ptr()) not in theirs])
        assert (step.written[0].start, step.written[0].count) == (None, 0)
        assert (step.sparse.rows.max_len, step.sparse.rows.bounds) == (MAX_LEN, None)
    # Row starts and flags, which the rows written to share; and the workspace.
    assert addresses[0] == addresses[1] and len(set(addresses[0])) == 3


def test_rows_that_model_runner_v2_does_not_tell_of_pad_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    common = engine.metadata([Row(0, 152), Row(3, 99), Row(1, 0, 0), Row(2, 0, 0)])
    common.is_prefilling, common.req_idx = common.is_prefilling[:2], common.req_idx[:2]
    step = engine.builder.build(0, common)
    assert step.sparse.rows.batch == 4
    assert step.sparse.rows.whole.tolist() == [False] * 4


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (None, "part of CUDA graphs, with an index for 4 requests of up to 512 tokens in {size} GiB set aside"),
        (4.5, "not part of CUDA graphs: its index for 4 requests {much}: --max-num-seqs 3 would fit"),
        (1.5, "not part of CUDA graphs: its index for 4 requests {much}: lower --max-model-len"),
    ],
)
def test_an_index_is_set_aside_before_the_cache(
    share: float | None, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For as many requests as there may be and nobody, if the device has memory for as many rows as `share` says."""
    # One group of 128 chunks: 64 clusters and their 8 units, in ten layers of four heads; edges are little beside it.
    heads, nodes = 10 * KV_HEADS, 64 + 8
    row = heads * (nodes * (HEAD_DIM * 4 + 3 * 4) + 2 * 4 + 128 * 4)
    monkeypatch.setattr(
        room.current_platform, "get_device_total_memory", lambda: 2**40 if share is None else 10 * share * row
    )
    with caplog.at_level(logging.INFO, logger="saccade"):
        engine = CudaEngine(monkeypatch, CLUSTERS, settings={"max_num_seqs": 4})
    size = f"{5 * row / 2**30:.2f}"
    much = f"of up to 512 tokens would take {size} GiB, more than 10% of the device's memory"
    told = told.format(size=size, much=much)
    assert [record.message for record in caplog.records] == [f"saccade: decoding steps are {told}"]
    held = room.room_of(engine.config)
    support = SaccadeFlashBuilder.get_cudagraph_support(engine.config, engine.spec)
    assert support.name == ("UNIFORM_SINGLE_TOKEN_DECODE" if share is None else "NEVER")
    assert (held.index is None) == (share is not None)
    if held.index is None:
        return
    # Four slots and nobody's, in the ten layers that select.
    assert (len(held.index.table.stops), [*held.index.layers]) == (5, [*range(2, LAYERS)])
    # vLLM may make builders twice, the first time to see what graphs need.
    again = SaccadeFlashBuilder(engine.spec, engine.names, engine.config, engine.device)
    assert again.sparse.slots.index is engine.builder.sparse.slots.index is held.index


def test_an_index_that_sleep_may_discard_is_not_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(monkeypatch, CLUSTERS, settings={"max_num_seqs": 1})
    engine.config.model_config.enable_sleep_mode = True
    del held_by(engine.config)["_saccade_room"]
    assert reasons_of(engine.config) == ["sleep mode may discard the memory of its index"]
    assert room.room_of(engine.config).index is None


def serve(engine: CudaEngine, **changes: Any) -> None:
    """Let the engine's steps serve with these; recall, if it is measured, in each."""
    sparse, options = engine.builder.sparse, replace(engine.serving.options, recall=1.0)
    sparse.serving = sparse.sampling._serving = replace(engine.serving, options=options, **changes)


def test_only_rows_that_decode_search_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also who has just finished a prompt; of who opted out, pads the batch or is none: nobody's."""
    engine = CudaEngine(monkeypatch, CLUSTERS, settings={"max_num_seqs": 5})
    engine.requests.rows[2] = RequestRow(sparse=False)
    nobody, index = 5, engine.builder.sparse.slots.index
    engine.run(Row(0, 150, 150, True), Row(1, 99, 99, True), Row(2, 103, 103, True))
    engine.run(Row(0, 151), Row(1, 100))
    engine.run(Row(3, 230, 230, True))
    step = decode_step(engine, [Row(1, 101), Row(2, 104), Row(3, 231), Row(0, 152), Row(0, 0, 0)])
    first, second, last = (engine.requests.rows[row].memory.slot for row in (0, 1, 3))
    assert index.placed[1].tolist() == [second, nobody, last, first, nobody]
    assert step.sparse.rows.whole.tolist() == [False, True, False, False, False]
    # What is prepared for a capture.
    step = decode_step(engine, [Row(0, 1), Row(1, 1)])
    assert (index.placed[1].tolist(), step.sparse.rows.whole.tolist()) == ([nobody] * 2, [True] * 2)


EXACT = "composed:scorer=exact,budget=64,roles={roles}"


@pytest.mark.parametrize(
    ("policy", "mixed"),
    [(PAGES, False), (PAGES, True), (CLUSTERS, True), ("tidal:budget=64,reselect=7", False), (EXACT, True)],
)
def test_recall_behind_a_captured_step_is_that_of_the_step(
    policy: str, mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured once the next step is prepared, which may write where the sampled rows lay.

    Rows outside of the policy, and those that the budget covers, do not count.
    """
    policy = policy.format(roles=mixed_roles(tmp_path))
    means = []
    for kept in (False, True):
        torch.manual_seed(0)
        engine = CudaEngine(monkeypatch, policy)
        engine.requests.rows[2] = RequestRow(sparse=False)
        prompts = [Row(0, 150, 150, True), Row(1, 99, 99, True), Row(2, 80, 80, True), Row(3, 40, 40, True)]
        engine.run(*prompts)
        recall = RecallObserver(LAYERS)
        sparse = engine.builder.sparse
        serve(engine, recall=recall)
        qkv, rows = engine.random_qkv(4), [Row(0, 151), Row(1, 100), Row(2, 81), Row(3, 41)]
        if kept:
            sparse.sampling.keep(QUERY_HEADS // KV_HEADS, 4)
            engine.step(rows, qkv)
            assert all(layer is None for layer in recall.per_layer())
            # Other rows and lengths in the same memory; or blocks of a row that is gone, written by a prompt.
            if mixed:
                engine.run(Row(0, 150, 150, True), Row(2, 82))
            engine.step([Row(2, 83), Row(3, 0, 0)], engine.random_qkv(2))
        else:
            common = engine.metadata(rows)
            step = engine.builder.build(0, common)
            sparse._state.observers = (OfRows(recall, [True, True, False, False], 151),)
            engine.layers_of(step, common, qkv)
            sparse._state.observers = ()
        means.append(recall.per_layer())
    alone, behind = means
    for layer, (one, other) in enumerate(zip(alone, behind, strict=True)):
        # Layers whose heads are all dense are vLLM's, and seen behind the step only.
        if engine.serving.plan.roles.passive[layer]:
            assert (one, other) == (None, MeanRecall(None, None, 0.0))
            continue
        assert one is not None and other is not None
        # Float32 sums over rows that are padded to other widths.
        for got, wanted in zip(other, one, strict=True):
            assert got == (wanted if wanted is None else pytest.approx(wanted, rel=1e-5))


def test_recall_is_measured_in_a_step_that_has_a_prompt_in_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step is not captured, and is measured while it runs, but for layers whose heads are all dense."""
    engine = CudaEngine(monkeypatch, PAGES)
    recall, told = RecallObserver(LAYERS), []
    report = SimpleNamespace(step=lambda selecting, _: told.append(selecting), measuring=told.append)
    report.layer_done = lambda layer: None
    serve(engine, recall=recall, metrics=report)
    engine.builder.sparse.sampling.keep(QUERY_HEADS // KV_HEADS, 4)
    measured = Mock(wraps=recall_module.recall_of)
    monkeypatch.setattr(recall_module, "recall_of", measured)
    engine.run(Row(0, 150, 150, True), Row(1, 40, 40, True))
    engine.run(Row(0, 151), Row(1, 41), Row(2, 99, 99, True))
    found = recall.per_layer()
    # Every layer counts its rows, whoever answers; recall is computed as wide as the longest of them.
    totals = engine.serving.counters.totals()
    assert [tokens for tokens, *_ in totals[:2]] == [151 + 41] * 2
    assert [steps for *_, steps in totals] == [totals[-1][-1]] * LAYERS
    assert {(len(call.args[0]), call.args[1].rows.max_len) for call in measured.call_args_list} == {(2, 151)}
    assert found[:2] == [None, None]
    assert all(layer is not None and 0 < layer.with_dense[0] < 1 for layer in found[2:])
    # Nothing is left for the next step to measure; a row that the budget covers does not count.
    engine.run(Row(0, 152), Row(1, 42), Row(2, 100))
    assert recall.per_layer() == found
    assert [seen // QUERY_HEADS for seen in recall._seen] == [0, 0] + [1] * (LAYERS - 2)
    assert told == [[], [151, 41], 1, [152, 42, 100]]


def test_what_model_runner_v2_prepares_for_a_capture_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dummy rows stand in slots that warm-up requests have had, one token each and not of a prompt."""
    engine = CudaEngine(monkeypatch, PAGES)
    told = list[Any]()
    report = SimpleNamespace(step=lambda selecting, _: told.append(selecting))
    report.disregard = lambda: told.append("nobody's")
    serve(engine, metrics=report)
    common = engine.metadata([Row(0, 1), Row(1, 1), Row(2, 1), Row(3, 1)])
    engine.layers_of(engine.builder.build_for_cudagraph_capture(common), common, engine.random_qkv(4))
    engine.prepared(engine.metadata([Row(0, 151), Row(1, 100)]))
    assert told == ["nobody's", [151, 100]]


def test_attention_is_handed_the_same_memory_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that a graph may hold and of others; zeros, which programs find and leave behind."""
    engine, sparse = CudaEngine(monkeypatch, PAGES), Mock(wraps=sparse_decode)
    state = engine.builder.sparse._state
    state.attention = replace(state.attention, sparse=sparse)
    engine.run(Row(0, 150, 150, True), Row(1, 99, 99, True))
    engine.run(Row(0, 151), Row(1, 100))
    engine.run(Row(0, 152), Row(2, 30, 30, True))
    handed = [call.kwargs["workspace"] for call in sparse.call_args_list]
    assert handed == [state.workspace] * 2 * (LAYERS - 2) and not state.workspace.turns.any()
