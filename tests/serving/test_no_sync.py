"""A decoding step on CUDA never waits for the device: it reads no tensor on the host, and its shapes are fixed.

The step runs on tensors without content (torch's "meta" device), so that our operations choose as they do on CUDA and a
read cannot succeed; `host_reads` watches every call for what only a real device would show.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engine import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, SCALE, SHAPE, CudaEngine, Row, mixed_roles
from torch import Tensor

from host_reads import HostReadError, watching
from saccade.adapters.vllm.checks import SCHEDULER
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.decode.attend import attend
from saccade.decode.counters import Counters
from saccade.decode.state import DecodeState
from saccade.methods.policy import Policy
from saccade.selection.clusters.tree import ClusterTree
from saccade.types import KVView, Rows, Softmax

READS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.sum().item(),
    lambda x: x[x > 0],
    lambda x: x.index_put_((x > 0,), x.new_zeros(())),
    lambda x: x.repeat_interleave(x),
    lambda x: x + torch.ones(3, dtype=torch.int64),
    lambda x: x[torch.zeros(2, dtype=torch.int64)],
    lambda x: torch.ones(3, dtype=torch.int64).to(x.device),
    lambda x: torch.tensor([1, 2], device=x.device),
    lambda x: x.new_tensor([1, 2]),
    lambda x: x.copy_(torch.ones(3, dtype=torch.int64)),
    lambda x: torch.equal(x, x),
)


def test_the_watch_sees_every_read() -> None:
    x = torch.empty(3, dtype=torch.int64, device="meta")
    for read in READS:
        with watching(), pytest.raises((HostReadError, RuntimeError, NotImplementedError)):
            read(x)


def test_the_watch_lets_pass_what_does_not_wait() -> None:
    x = torch.empty(3, dtype=torch.int64, device="meta")
    with watching() as watched:
        torch.ones(3, dtype=torch.int64).to(x.device, non_blocking=True)
        x.masked_fill_(x > 0, 1)
        (x * torch.tensor(3)).sort()
        torch.where(x > 0, x, -1)[x]
        x.repeat_interleave(x, output_size=5)
    assert ("repeat_interleave", [(5,)]) in watched.shapes


POLICIES = (
    "dense",
    "streaming:budget=64",
    "quest:budget=64,page=16,heads=query,min_pages=3,keep_last=false",
    "quest:budget=70,page=16",
    "tidal:rule=top_p,top_p=0.9,budget=128,reselect=7",
    "tidal:rule=threshold,threshold=0.01,budget=128,reselect=7,sinks=4,window=16",
    "lychee_decode:rule=ratio,ratio=0.1,roles=every:4",
    "less_is_more:budget=64,reselect=7",
    "lychee_decode:budget=64,page=16,roles=every:4",
    "exact_topk:budget=48",
    "composed:scorer=page_bounds,page=16,budget=64,roles={roles}",
    "composed:scorer=page_bounds,pooling=mass,budget=64",
    "resa:min_pages=2,ratio=0.05 in fp8",
    "tidal:budget=64,reselect=7 in fp8",
    "lychee_decode:budget=64,roles=every:4 in fp8",
    "lychee_cluster:budget=64",
    "lychee_cluster:form=paper,budget=64",
    "token_clusters:budget=64",
)
"""Every rule, unit and scorer, and of those that share one the case that does more."""

MIXED = (Row(0, 301), Row(1, 180, 69, True), Row(2, 98), Row(3, 40))


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaEngine:
    policy, _, cache = request.param.format(roles=mixed_roles(tmp_path)).partition(" in ")
    settings = {"scheduler_cls": SCHEDULER, "async_scheduling": False} if "resa" in policy else {}
    made = CudaEngine(monkeypatch, policy, device="meta", cache=cache or "auto", settings=settings)
    made.requests.rows[3] = RequestRow(sparse=False)
    made.step([Row(0, 299, 299, True)], made.random_qkv(299))
    return made


def watched_step(engine: CudaEngine, rows: Sequence[Row]) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The calls of a step's layers; preparing it is watched too. Rows without tokens pad the batch."""
    tokens = max(sum(row.new for row in rows), len(rows))
    common, qkv = engine.metadata(rows), engine.random_qkv(tokens)
    common.num_actual_tokens, common.slot_mapping = tokens, torch.zeros(tokens, dtype=torch.int64, device="meta")
    with watching():
        step = engine.builder.build(0, common)
    with watching() as watched:
        engine.layers_of(step, common, qkv)
    return watched.shapes


@pytest.mark.parametrize("engine", POLICIES, indirect=True)
def test_a_step_reads_nothing_on_the_host_and_its_shapes_are_fixed(engine: CudaEngine) -> None:
    """Decoding rows beside a chunk of a prompt and a row that opted out; and alone, of one shape whatever the lengths,
    also those that the budget covers, with rows that pad, are whole or are neither.

    With fixed shapes a captured graph can hold it.
    """
    watched_step(engine, MIXED)
    watched_step(engine, (Row(0, 1), Row(1, 1), Row(2, 1)))
    first = watched_step(engine, (Row(0, 300), Row(1, 211), Row(2, 197)))
    same = [(Row(1, 129), Row(0, 300), Row(2, 299)), (Row(0, 300), Row(1, 3), Row(3, 90))]
    if engine.serving.plan.selector is not None:
        same += [(Row(0, 2), Row(1, 1), Row(2, 0, 0)), (Row(3, 500), Row(1, 129), Row(0, 511))]
    for rows in same:
        assert watched_step(engine, rows) == first


@pytest.mark.parametrize("engine", [one for one in POLICIES if "lychee_cluster" in one], indirect=True)
def test_taking_text_in_reads_nothing_on_the_host(engine: CudaEngine) -> None:
    """Rows of prompts and rows that decode, whose text is cut and planted; then rows enter the slots of others."""
    watched_step(engine, MIXED)
    table = engine.builder.sparse.slots.index.table
    watched_step(engine, (Row(0, 310, 9, True), Row(1, 300, 120, True), Row(2, 99)))
    watched_step(engine, (Row(0, 311), Row(1, 301), Row(2, 100)))
    assert table.stops[:3] == [311 // 16 * 16, 301 // 16 * 16, 100 // 16 * 16]
    # As model runner V1 says that one goes, and as V2 does.
    engine.requests._leave(1)
    for row in (0, 1):
        engine.requests._enter(row, RequestRow())
    watched_step(engine, (Row(0, 312), Row(1, 200, 200, True)))
    watched_step(engine, (Row(0, 313), Row(1, 201)))
    assert table.stops[:2] == [312 // 16 * 16, 200 // 16 * 16]


def test_an_index_beside_a_cache_of_transformers_is_never_read_on_the_host() -> None:
    """Lengths are the host's there; in a step that cuts chunks and plants them."""
    plan, layers = Policy.from_spec("lychee_cluster:form=paper,budget=96").plan(SHAPE), range(LAYERS)
    state = DecodeState(plan, Counters(LAYERS), exhaustive_is_dense=False)
    length, more = 300, 84
    page = torch.randn(1, length + more, KV_HEADS, HEAD_DIM)

    def step(length: int, device: str) -> None:
        rows = Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [length])
        moved = {name: getattr(rows, name).to(device) for name in ("page_table", "row_start", "seq_lens")}
        rows = replace(rows, **moved)
        storage = page[:, :length].to(device)
        q = torch.randn(1, QUERY_HEADS, HEAD_DIM).to(device)
        state.begin(length - 1)
        with watching() if device == "meta" else nullcontext():
            for layer in layers:
                attend(state, layer, q, KVView(storage, storage, rows), Softmax(SCALE))

    step(length, "cpu")
    index: Any = state.indexes.index  # type: ignore[attr-defined]
    table, (stop,) = index.table, index.table.stops
    for name in ("edges", "counts", "ends"):
        setattr(table, name, getattr(table, name).to("meta"))
    index._lay_out(ClusterTree(**{name: part.to("meta") for name, part in index.trees.tensors().items()}))
    step(length + more, "meta")
    assert table.stops[0] > stop
