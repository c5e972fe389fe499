"""The CUDA backend on CPU tensors: vLLM's own layers and classes, FlashAttention by its documented semantics.

Over a cache of 8-bit floats keys and values are told to the oracle as they come out of it. Queries are numbers that
8 bits hold, so that it does not matter whose kernel answers, vLLM's with quantised queries or ours with all digits,
unless a test says so.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engine import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, SCALE, CudaEngine, Row, mixed_roles, to_fp8
from cuda_requests import CLUSTERS, MIXED_PAGES, PAGES, QKV, REUSED_PAGES, Requests
from engines import force_own_path
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from host_reads import watching
from saccade.adapters.vllm.worker import cuda, room
from saccade.adapters.vllm.worker.cuda import SaccadeFlashBackend, SaccadeFlashBuilder
from saccade.adapters.vllm.worker.mixed_step import written_in
from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.tokens import ALL
from saccade.errors import ServingError
from saccade.types import Rows


def through_cache(numbers: Tensor, scale: Tensor) -> Tensor:
    return to_fp8(numbers, scale).float() * scale


class QuantisedRequests(Requests):
    """Keeps what the cache makes of keys and values."""

    def _draw(self, tokens: int) -> tuple[QKV, QKV]:
        given = [
            (through_cache(q, layer._q_scale), k, v)
            for layer, (q, k, v) in zip(self._engine.layers, self._engine.random_qkv(tokens), strict=True)
        ]
        held = [
            (q, through_cache(k, layer._k_scale), through_cache(v, layer._v_scale))
            for layer, (q, k, v) in zip(self._engine.layers, given, strict=True)
        ]
        return given, held


@pytest.mark.parametrize(
    ("policy", "block", "layout", "cache"),
    [
        (PAGES, 16, "LBNHC", "auto"),
        (PAGES, 32, "LBHNC", "fp8"),
        (PAGES + ",heads=query", 16, "BLNHC", "auto"),
        (PAGES + ",heads=query", 16, "BLHNC", "fp8"),
        ("resa:min_pages=2,ratio=0.05,rectify=none", 32, "LBHNC", "auto"),
        (REUSED_PAGES, 16, "BLHNC", "auto"),
        (REUSED_PAGES, 16, "BLNHC", "fp8"),
        ("composed:scorer=exact,page=32,budget=96,roles=layers:2+6", 16, "LHBNC", "auto"),
        (MIXED_PAGES, 32, "LBNHC", "auto"),
        ("streaming:budget=64", 16, "LBNHC", "fp8"),
        ("tidal:rule=top_p,top_p=0.9,budget=128,reselect=7,heads=query", 16, "LBHNC", "auto"),
        ("less_is_more:budget=64,reselect=7", 16, "BLNHC", "fp8"),
        ("lychee_decode:budget=64,roles=every:4", 16, "LBNHC", "auto"),
        (CLUSTERS, 16, "BLHNC", "auto"),
        ("lychee_cluster:form=paper,budget=64,chunking=fixed", 32, "LBHNC", "auto"),
        ("dense", 16, "LBNHC", "fp8"),
    ],
)
def test_every_row_gets_what_the_policy_says(
    policy: str, block: int, layout: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy.format(roles=mixed_roles(tmp_path))
    force_own_path(monkeypatch)
    engine = CudaEngine(monkeypatch, policy, block=block, layout=layout, cache=cache)
    (Requests if cache == "auto" else QuantisedRequests)(engine).run_mixed()


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
        assert (dense.parent_tokens, dense.sparse) == (ALL, None)
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


def test_rows_beside_those_that_decode_are_a_batch_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together or not, rows without tokens left out; a page that one token does not fill waits until it is searched."""
    engine, built = CudaEngine(monkeypatch, PAGES), list[Any]()
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", lambda _, prefix, common, fast: built.append(common))
    rows = [Row(0, 152), Row(1, 9, 9, True), Row(2, 40, 2, True), Row(3, 96), Row(0, 0, 0)]
    for order in ([0, 1, 2, 3, 4], [2, 0, 1, 3, 4]):
        common = engine.metadata([rows[row] for row in order])
        common.compute_num_computed_tokens()
        common.logits_indices_padded = common.query_start_loc
        written = engine.prepared(common).written
        alone = engine.metadata([rows[row] for row in order if row in (1, 2)])
        for name, wanted in vars(alone).items():
            got = getattr(built[-1], name)
            assert got is None if wanted is None else torch.equal(*map(torch.as_tensor, (got, wanted))), name
        assert torch.equal(built[-1].compute_num_computed_tokens(), alone.compute_num_computed_tokens())
        several = ([0, 38] if order[0] == 0 else [38, 0], 9)
        later = written_in(common, engine.builder.sparse.batch(common), 16)
        for parts, single in ((written, [151, 95]), (later, [95])):
            assert [(part.start.tolist(), part.count) for part in parts] == [(single, 1), several]


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


def test_our_kernels_are_asked_with_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own layers would have 4 bits of each query: what those answer is far off what ours do."""

    class AllDigits(QuantisedRequests):
        def _draw(self, tokens: int) -> tuple[QKV, QKV]:
            given, held = super()._draw(tokens)
            shift = [(q * (1 + torch.rand_like(q) / 16), k, v) for q, k, v in given]
            return shift, [(q, k, v) for (q, _, _), (_, k, v) in zip(shift, held, strict=True)]

    force_own_path(monkeypatch)
    engine = CudaEngine(monkeypatch, "streaming:budget=64", cache="fp8")
    requests: Any = QuantisedRequests(engine)
    requests.run([Row(0, 150, 150, True)])
    decoding = AllDigits(engine)
    decoding._fed = requests._fed
    decoding.run([Row(0, 151)])
    with pytest.raises(AssertionError):
        decoding.run([Row(1, 40, 40, True)])


@pytest.mark.parametrize("heads", [1, KV_HEADS])
def test_queries_are_quantised_for_vllms_kernel_by_its_layers_factor(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for all heads, or one for each KV head and the query heads that it serves."""
    engine = CudaEngine(monkeypatch, "dense", cache="fp8")
    layer = engine.layers[3]
    assert layer.query_quant is None
    layer._q_scale = torch.linspace(0.01, 0.05, heads).squeeze(0)
    query, seen = torch.randn(5, QUERY_HEADS, HEAD_DIM), []
    monkeypatch.setattr(cuda.FlashAttentionImpl, "forward", lambda impl, _, given, *__: seen.append((impl, given)))
    layer.impl.stock(layer, query, None, None, None, None, None)
    ((impl, given),) = seen
    # Without it vLLM leaves the factor out.
    assert impl.supports_quant_query_input
    each = layer._q_scale.expand(KV_HEADS).repeat_interleave(QUERY_HEADS // KV_HEADS)[:, None]
    assert given.shape == query.shape
    assert torch.equal(given.float(), to_fp8(query, each).float())


def test_scales_are_read_where_the_engine_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view holds no copy: a graph that was captured before sees what is written there later."""
    engine = CudaEngine(monkeypatch, PAGES, cache="fp8")
    layer = engine.layers[2]
    kv = layer.impl.view(layer, layer.kv_cache, Rows.on_host(engine.tables[:1], [0], [1]))
    assert (kv.k.dtype, kv.v.dtype) == (torch.float8_e4m3fn,) * 2
    layer._k_scale.fill_(7.0)
    layer._v_scale.fill_(9.0)
    assert kv.k_scale is not None and kv.v_scale is not None
    assert (kv.k_scale.tolist(), kv.v_scale.tolist()) == ([7.0] * KV_HEADS, [9.0] * KV_HEADS)
    plain = CudaEngine(monkeypatch, PAGES).layers[2]
    kv = plain.impl.view(plain, plain.kv_cache, Rows.on_host(engine.tables[:1], [0], [1]))
    assert (kv.k.dtype, kv.k_scale, kv.v_scale) == (torch.float32, None, None)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC"])
def test_bounds_are_numbers_of_the_cache(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each block, in its bytes: the smallest and largest of a full page's own numbers; the search adds one."""
    engine = CudaEngine(monkeypatch, PAGES, block=32, layout=layout, cache="fp8")
    content = 32 * KV_HEADS * 2 * HEAD_DIM
    assert engine.spec.unpadded_page_size_bytes == content
    assert engine.spec.extra_page_bytes == content // 16
    # FLASH_ATTN reads in 16 bytes.
    assert all(layer.kv_cache.stride(0) % 16 == 0 for layer in engine.layers)
    requests = QuantisedRequests(engine)
    for length in range(75, 82):
        requests.run([Row(0, length, 75, True) if length == 75 else Row(0, length)])
    layer, bounds = engine.layers[4], engine.serving.indexes.layers[4]
    assert isinstance(bounds, BlockBounds)
    assert bounds.lower.dtype == bounds.upper.dtype == torch.float8_e4m3fn
    assert bounds.lies_in(layer.kv_cache)
    kv = layer.impl.view(layer, layer.kv_cache, Rows.on_host(engine.tables[:1], [0], [81]))
    assert kv.k_scale is not None
    table = engine.tables[0]
    keys = kv.k[table].flatten(0, 1)[:81].double()
    for page in range(81 // 16):
        own = keys[page * 16 : (page + 1) * 16] * kv.k_scale.double()[:, None]
        block, inside = int(table[page // 2]), page % 2
        low, high = (
            side[block, :, inside].double() * kv.k_scale.double()[:, None] for side in (bounds.lower, bounds.upper)
        )
        assert torch.equal(own.amin(0), low)
        assert torch.equal(own.amax(0), high)


@pytest.mark.parametrize("supported", [True, False])
def test_vllm_judges_what_a_policy_can_decode_from_and_we_the_rest(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other formats it would say that a backend named CUSTOM does not support them; `checks` names those that go."""
    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: supported)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    asked: dict[str, Any] = {
        **{"head_size": 128, "dtype": torch.bfloat16, "block_size": 16, "attn_type": "decoder"},
        **dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False),
    }
    found = {
        name: cuda.SaccadeFlashBackend.validate_configuration(
            device_capability=DeviceCapability(9, 0), kv_cache_dtype=name, **asked
        )
        for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
    }
    assert [name for name, reasons in found.items() if reasons] == ([] if supported else ["fp8", "fp8_e4m3"])
