"""The CUDA backend on CPU tensors: vLLM's own layers and classes, FlashAttention by its documented semantics.

Over a cache of 8-bit floats keys and values are told to the oracle as they come out of it. Queries are numbers that
8 bits hold, so that it does not matter whose kernel answers, vLLM's with quantised queries or ours with all digits,
unless a test says so.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_engine import HEAD_DIM, KV_HEADS, LAYERS, QKV, QUERY_HEADS, SCALE, CudaEngine, Row, mixed_roles, to_fp8
from engines import force_own_path
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from host_reads import watching
from saccade.adapters.vllm.cache_dtype import digits
from saccade.adapters.vllm.worker import cuda, room
from saccade.adapters.vllm.worker.cuda import SaccadeFlashBackend, SaccadeFlashBuilder
from saccade.adapters.vllm.worker.mixed_step import written_in
from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.adapters.vllm.worker.requests import RequestRow
from saccade.adapters.vllm.worker.tokens import ALL
from saccade.decode.attend import attend
from saccade.decode.counters import Counters
from saccade.decode.state import DecodeState
from saccade.errors import ServingError
from saccade.types import KVView, Rows, Softmax

PAGES, CLUSTERS = "quest:budget=64,page=16", "lychee_cluster:budget=64"


def through_cache(numbers: Tensor, scale: Tensor) -> Tensor:
    return to_fp8(numbers, scale).float() * scale


class Requests:
    """What each request has been fed, its keys and values in order, and what it should be answered."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._fed: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._states: dict[int, DecodeState] = {}

    def run(self, rows: Sequence[Row], padding: int = 0) -> None:
        """One step on random numbers, every output compared; `padding` positions follow that belong to no row."""
        edges = [0, *accumulate(row.new for row in rows)]
        given, qkv = self._draw(edges[-1] + padding)
        for one in (tensor for layer in given for tensor in layer):
            one[edges[-1] :] = torch.nan
        outputs = self._engine.step(rows, given)
        for row, own in zip(rows, map(slice, edges, edges[1:]), strict=True):
            expected = self._expected(row, own, qkv) if row.new else [out[own] for out in outputs]
            # Float32 over a few hundred tokens; one token more or less moves a result by about 1e-2.
            torch.testing.assert_close([out[own] for out in outputs], expected, atol=1e-5, rtol=0)

    def run_mixed(self) -> None:
        """Prompts in chunks beside decoding rows, one opted out; then a token a row, in another order, padded."""
        self._engine.requests.rows[3] = RequestRow(sparse=False)
        self.run([Row(0, 150, 150, True), Row(3, 100, 100, True)])
        self.run([Row(0, 151), Row(1, 65, 65, True), Row(3, 101)])
        self.run([Row(1, 130, 65, True), Row(3, 102), Row(0, 152)])
        self.run([Row(1, 131, 1, True), Row(3, 103), Row(0, 153)], padding=3)
        self.run([Row(0, 154), Row(1, 132), Row(2, 1, 1, True)])
        # Rows without tokens pad a batch.
        self.run([Row(1, 133), Row(0, 155), Row(2, 0, 0), Row(3, 0, 0)], padding=2)

    def _draw(self, tokens: int) -> tuple[QKV, QKV]:
        """What layers are given, and what it is by the time that it is read: as a quantised cache makes it."""
        drawn, layers = self._engine.random_qkv(tokens), self._engine.layers
        if not self._engine.quantised:
            return drawn, drawn
        given = [(through_cache(q, one._q_scale), k, v) for one, (q, k, v) in zip(layers, drawn, strict=True)]
        return given, [
            (q, through_cache(k, one._k_scale), through_cache(v, one._v_scale))
            for one, (q, k, v) in zip(layers, given, strict=True)
        ]

    def _expected(self, row: Row, own: slice, qkv: QKV) -> list[Tensor]:
        new = [(k[own], v[own]) for _, k, v in qkv]
        held = self._fed.get(row.slot) or [(k[:0], v[:0]) for k, v in new]
        self._fed[row.slot] = [
            (torch.cat((k[: row.length - row.new], fresh_k)), torch.cat((v[: row.length - row.new], fresh_v)))
            for (k, v), (fresh_k, fresh_v) in zip(held, new, strict=True)
        ]
        queries = [q[own] for q, _, _ in qkv]
        sparse = row.new == 1 and not row.prefilling and self._engine.requests.rows[row.slot].sparse
        return self._selected(row, queries) if sparse else self._dense(row, queries)

    def _selected(self, row: Row, queries: list[Tensor]) -> list[Tensor]:
        """By the engine alone, on a cache that is one page."""
        plan = self._engine.serving.plan
        state = self._states.setdefault(row.slot, DecodeState(plan, Counters(LAYERS), exhaustive_is_dense=False))
        state.begin(row.length - 1)
        rows = Rows.on_host(torch.zeros(1, 1, dtype=torch.int32), [0], [row.length])
        caches = self._fed[row.slot]
        return [
            attend(state, number, q, KVView(k[None], v[None], rows), Softmax(SCALE))
            for number, (q, (k, v)) in enumerate(zip(queries, caches, strict=True))
        ]

    def _dense(self, row: Row, queries: list[Tensor]) -> list[Tensor]:
        hidden = torch.arange(row.length) > torch.arange(row.length - row.new, row.length)[:, None]
        outputs = []
        for q, (k, v) in zip(queries, self._fed[row.slot], strict=True):
            keys, values = (part.double().repeat_interleave(QUERY_HEADS // KV_HEADS, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * SCALE
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values).float())
        return outputs


REUSED_PAGES = "composed:scorer=page_bounds,page=16,budget=64,roles=layers:2+6"


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
        ("composed:scorer=page_bounds,page=16,budget=64,roles={roles}", 32, "LBNHC", "auto"),
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
    Requests(engine).run_mixed()


@pytest.mark.parametrize(("policy", "captured"), [(PAGES, True), (CLUSTERS, True), (CLUSTERS, False)])
def test_covered_rows_go_to_the_parent(policy: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("policy", "wanted"), [(PAGES, [(2, True), (1, False)]), ("quest:budget=64,page=16,dense_layers=0", [(1, False)])]
)
def test_second_metadata_has_no_schedule(
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
def test_only_a_prompt_in_between_is_copied(order: list[int], copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM sorts a batch, layers read and write a prompt where it is."""
    engine = CudaEngine(monkeypatch, PAGES)
    for layer in engine.layers:
        layer.use_direct_call = True  # or nobody sees what happens in it
    engine.run(Row(0, 150, 150, True), Row(1, 99, 99, True))
    rows = [Row(0, 151), Row(1, 100), Row(2, 70, 70, True)]
    common, qkv = engine.metadata([rows[row] for row in order]), engine.random_qkv(72)
    step = engine.builder.build(0, common)
    with watching() as watched:
        engine.layers_of(step, common, qkv)
    moving = {"index_select", "index_copy_"}
    assert {name for name, _ in watched.shapes} & moving == (moving if copied else set())


def test_a_profiling_run_has_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    common = engine.metadata([Row(0, 5, 5, True)])
    for out in engine.layers_of(None, common, engine.random_qkv(5)):
        assert not out.any()
    assert not engine.serving.indexes.layers


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"alibi_slopes": [0.5] * QUERY_HEADS}, "ALiBi"),
        # What is planned for heads that are not there picks for the wrong ones, and answers.
        ({"num_kv_heads": QUERY_HEADS}, f"a layer has {QUERY_HEADS} KV heads, its configuration says {KV_HEADS}"),
    ],
)
def test_layers_of_other_kinds_are_refused(
    setting: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CudaEngine(monkeypatch, PAGES)
    given = {"cache_config": engine.config.cache_config, "prefix": "model.layers.99.self_attn.attn"}
    given |= {"attn_backend": SaccadeFlashBackend, "num_kv_heads": KV_HEADS, **setting}
    with set_current_vllm_config(engine.config), pytest.raises(ServingError, match=reason):
        Attention(QUERY_HEADS, HEAD_DIM, SCALE, **given)


def test_our_kernels_are_asked_with_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own layers would have 4 bits of each query: what those answer is far off what ours do."""

    class AllDigits(Requests):
        def _draw(self, tokens: int) -> tuple[QKV, QKV]:
            given, held = super()._draw(tokens)
            shift = [(q * (1 + torch.rand_like(q) / 16), k, v) for q, k, v in given]
            return shift, [(q, k, v) for (q, _, _), (_, k, v) in zip(shift, held, strict=True)]

    force_own_path(monkeypatch)
    engine = CudaEngine(monkeypatch, "streaming:budget=64", cache="fp8")
    requests, decoding = Requests(engine), AllDigits(engine)
    requests.run([Row(0, 150, 150, True)])
    decoding._fed = requests._fed
    decoding.run([Row(0, 151)])
    with pytest.raises(AssertionError):
        decoding.run([Row(1, 40, 40, True)])


@pytest.mark.parametrize("heads", [1, KV_HEADS])
def test_queries_are_quantised_for_vllms_kernel(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all heads, or one for each KV head and the query heads that it serves; what comes in 8 bits stays."""
    engine = CudaEngine(monkeypatch, "dense", cache="fp8")
    layer = engine.layers[3]
    assert layer.query_quant is None
    layer._q_scale = torch.linspace(0.01, 0.05, heads).squeeze(0)
    each = layer._q_scale.expand(KV_HEADS).repeat_interleave(QUERY_HEADS // KV_HEADS)[:, None]
    query, seen = torch.randn(5, QUERY_HEADS, HEAD_DIM), []
    monkeypatch.setattr(cuda.FlashAttentionImpl, "forward", lambda impl, _, given, *__: seen.append((impl, given)))
    for asked in (query, quantised := to_fp8(query, each)):
        layer.impl.stock(layer, asked, None, None, None, None, None)
    for impl, given in seen:
        # Without it vLLM leaves the factor out.
        assert impl.supports_quant_query_input
        assert torch.equal(given.float(), quantised.float())
    assert torch.equal(digits(quantised, layer._q_scale), quantised.float() * each)


def test_scales_are_read_where_the_engine_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view holds no copy: a graph that was captured before sees what is written there later."""
    engine = CudaEngine(monkeypatch, PAGES, cache="fp8")
    layer = engine.layers[2]
    kv = layer.impl.view(layer, layer.kv_cache, Rows.on_host(engine.tables[:1], [0], [1]))
    assert (kv.k.dtype, kv.v.dtype) == (torch.float8_e4m3fn,) * 2
    layer._k_scale.fill_(7.0)
    layer._v_scale.fill_(9.0)
    assert (kv.k_scale.tolist(), kv.v_scale.tolist()) == ([7.0] * KV_HEADS, [9.0] * KV_HEADS)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLHNC"])
def test_bounds_are_numbers_of_the_cache(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each block, in its bytes: so the same factor says what they stand for."""
    engine = CudaEngine(monkeypatch, PAGES, block=32, layout=layout, cache="fp8")
    content = 32 * KV_HEADS * 2 * HEAD_DIM
    assert (engine.spec.unpadded_page_size_bytes, engine.spec.extra_page_bytes) == (content, content // 16)
    # FLASH_ATTN reads in 16 bytes.
    assert all(layer.kv_cache.stride(0) % 16 == 0 for layer in engine.layers)
    engine.run(Row(0, 79, 79, True))
    engine.run(Row(0, 80))
    layer, bounds, table = engine.layers[4], engine.serving.indexes.layers[4], engine.tables[0]
    assert isinstance(bounds, BlockBounds) and bounds.lies_in(layer.kv_cache)
    keys = layer.impl.view(layer, layer.kv_cache, Rows.on_host(engine.tables[:1], [0], [80])).k
    assert bounds.lower.dtype == bounds.upper.dtype == keys.dtype == torch.float8_e4m3fn
    for page, own in enumerate(keys[table].flatten(0, 1)[:80].float().split(16)):
        low, high = (side[table[page // 2], :, page % 2].float() for side in (bounds.lower, bounds.upper))
        assert torch.equal(own.amin(0), low) and torch.equal(own.amax(0), high)


@pytest.mark.parametrize("supported", [True, False])
def test_vllm_judges_what_a_policy_can_decode_from(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_vllm_asks_of_the_backend() -> None:
    assert SaccadeFlashBackend.get_name() == "CUSTOM"
    assert SaccadeFlashBackend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert not SaccadeFlashBackend.forward_includes_kv_cache_update
    # Else a model of vLLM 0.33 calls without keys.
    assert not SaccadeFlashBackend.supports_kv_cache_update_bypass
    assert not SaccadeFlashBuilder.supports_update_block_table


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
