"""vLLM's tiles for AMX, read where they lie; its own packing needs AVX-512 with bfloat16, its attention AMX."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from saccade.adapters.vllm.worker import cpu
from saccade.adapters.vllm.worker.backend import SparseBuilder
from saccade.types import Rows


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's library for this processor has no packing for AMX"
)
@pytest.mark.parametrize(("dim", "block"), [(32, 32), (64, 128), (96, 96), (128, 32), (256, 64)])
def test_a_layer_reads_what_vllm_has_packed(dim: int, block: int) -> None:
    current_platform.import_kernels()
    heads, count = 3, 3 * block - 5
    k, v = torch.randn(2, count, heads, dim).bfloat16()
    cache = torch.full((5, heads, block, 2 * dim), torch.nan, dtype=torch.bfloat16)
    halves = cache.view(5, heads, 2 * block, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        k, v, *halves, torch.arange(count) + block, "amx", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    layer: Any = SimpleNamespace(kv_cache_dtype="auto", scales=lambda layer: (None, None))
    rows = Rows.on_host(torch.arange(5, dtype=torch.int32)[None], [block], [count])
    kv = cpu.SaccadeCPUAttention.view(layer, SimpleNamespace(isa="amx"), cache, rows)
    assert kv.tiled and (kv.page, kv.kv_heads, kv.head_dim) == (block, heads, dim)
    found = kv.in_rows()
    for got, want in ((found.k, k), (found.v, v)):
        assert torch.equal(got.reshape(-1, heads, dim)[block : block + count], want)


@pytest.mark.parametrize(
    ("dtype", "reads", "isa"), [("auto", True, "amx"), ("auto", False, "vec"), ("fp8", True, "vec")]
)
def test_tiles_are_kept_where_the_library_reads_them(
    dtype: str, reads: bool, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(builder: Any) -> None:
        vars(builder).update(isa="amx", kv_cache_dtype=dtype, head_dim=64, layer_names=["one"], vllm_config=None)
        vars(builder).update(num_heads=8, num_kv_heads=2)

    told: list[str] = []
    monkeypatch.setattr(SparseBuilder, "__init__", made)
    monkeypatch.setattr(cpu, "SparseRows", lambda config, view, room: None)
    monkeypatch.setattr(cpu, "text_of", lambda config: None)
    monkeypatch.setattr(cpu, "reads_tiles", lambda *sizes: reads and sizes == (64, 4))
    monkeypatch.setattr(cpu.SaccadeCPUBuilder, "_set_isa_to_layers", lambda builder, names: told.extend(names))
    assert (cpu.SaccadeCPUBuilder().isa, told) == (isa, [] if isa == "amx" else ["one"])
