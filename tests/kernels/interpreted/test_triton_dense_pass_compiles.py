"""Triton's dense pass as the compiler makes it: nothing spilled, products on tensor cores."""

import pytest
from compiling import Compiled, compile_kernel

from saccade.kernels.dense_pass.triton import tuning
from walking import in_turn

POINTERS = "q k v table starts lengths parts sums".split()
STEPS = "q_row q_head q_place k_page k_slot k_head v_page v_slot v_head table_row".split()
ONES = dict.fromkeys("q_dim k_dim v_dim table_step starts_step lengths_step".split(), 1)


def compiled(
    queries: int, *, dtype: str = "bf16", cache: str | None = None, dim: int = 128,
    group: int = 4, page: int = 0, capability: int = 90,
) -> Compiled:  # fmt: skip
    size = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype] if cache is None else 1
    tile, chosen = tuning(queries, 1 << (dim - 1).bit_length(), size)
    kinds = {"q": f"*{dtype}", "k": f"*{cache or dtype}", "v": f"*{cache or dtype}"}
    signature = {
        **{name: kinds.get(name, "*fp32" if name in ("parts", "sums") else "*i32") for name in POINTERS},
        **dict.fromkeys((*STEPS, "count", "kv_heads", "splits"), "i32"),
        **{"log2_scale": "fp32", "log2_cap": "fp32"},
    }
    constants = {
        **ONES,
        **{"GROUP": group, "TILE": tile, "DIM": dim, "INNER": 1 << (dim - 1).bit_length()},
        **{"PAGE": page, "WIDE": False, "CAPPED": False, "BLOCK": chosen.block, "STAGES": chosen.stages},
        **{"k_scale": None, "v_scale": None, "k_scale_step": 0, "v_scale_step": 0},
    }
    if cache is not None:
        signature |= {"k_scale": "*fp32", "v_scale": "*fp32"}
        constants |= {"k_scale_step": 1, "v_scale_step": 1}
        del constants["k_scale"], constants["v_scale"]
    return compile_kernel(
        "saccade.kernels.dense_pass.triton", "_attend", signature, constants, (*POINTERS, *STEPS[:-1]),
        capability=capability, warps=chosen.warps, stages=chosen.stages,
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "page"), in_turn([(132, 4), (264, 8), (33, 1)], [16, 0]))
def test_nothing_is_spilled(shape: tuple[int, int], page: int) -> None:
    queries, group = shape
    made = compiled(queries, group=group, page=page)
    assert made.spilled == 0
    if queries > 64:
        assert "wgmma" in made.ptx


@pytest.mark.parametrize(
    ("dtype", "cache", "dim", "capability"),
    [("fp16", None, 64, 80), ("bf16", "fp8e4nv", 128, 90), ("fp32", None, 128, 80), ("bf16", None, 256, 90)],
)
def test_other_numbers_and_devices(dtype: str, cache: str | None, dim: int, capability: int) -> None:
    assert compiled(132, dtype=dtype, cache=cache, dim=dim, capability=capability).registers > 0
