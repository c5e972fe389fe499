"""Triton's attention as the compiler makes it: nothing spilled, the cache copied in the background, tensor cores."""

import re
from typing import Any

import pytest
from compiling import Compiled, compile_kernel, expect_fit, signature_of
from kernel_checks import DEVICES

from saccade.kernels._triton import attention as kernels
from saccade.kernels._triton import combine, scoring
from saccade.kernels._triton.combine import MOST_JOINED
from saccade.kernels._triton.plan import LISTED_REGISTERS, tuning
from saccade.kernels.dense_pass import triton as dense_pass
from walking import in_turn

STEPS = "q_row q_head q_place k_page k_slot k_head v_page v_slot v_head ids_row ids_set".split()
ONES = dict.fromkeys("q_dim k_dim v_dim table_step starts_step lengths_step ids_step".split(), 1)
SETS = "ids ids_row ids_set ids_step counts counts_row counts_set".split()
SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
KINDS = {**dict.fromkeys("table starts lengths ids counts turns".split(), "*i32"), "whole": "*i1"}
KINDS |= dict.fromkeys("parts sums scores k_scale v_scale".split(), "*fp32")
KINDS |= {"log2_scale": "fp32", "log2_cap": "fp32", "dense_heads": "i64", "kept_heads": "i64"}


def describe(
    kernel: Any, dtype: str, cache: str, dim: int, group: int, page: int, pooling: str, absent: tuple[str, ...] = ()
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    """Types, constants and the parameters known to be multiples of 16, of those that a kernel has."""
    constants: dict[str, Any] = {
        **ONES,
        **{"k_scale_step": 1, "v_scale_step": 1},
        **{"GROUP": group, "LISTED_GROUP": group, "TILE": max(16, 1 << (group - 1).bit_length()), "DIM": dim},
        **{"INNER": 1 << (dim - 1).bit_length(), "PAGE": page, "POOLING": pooling, "WIDE": False, "DIRECT": False},
        **{"CAPPED": False, "JOINED": MOST_JOINED, **dict.fromkeys(absent)},
    }
    if not cache.startswith("fp8"):
        constants |= {"k_scale": None, "v_scale": None, "k_scale_step": 0, "v_scale_step": 0}
    if not pooling:
        constants["scores"] = None
    kinds = KINDS | dict.fromkeys(("q", "sinks", "out"), f"*{dtype}") | dict.fromkeys(("k", "v"), f"*{cache}")
    signature = signature_of(kernel, kinds, constants)
    whole = (name for name, kind in signature.items() if kind.startswith("*") and name not in ("whole", "sinks"))
    divisible = (*whole, *(name for name in STEPS if name in signature))
    return signature, {name: value for name, value in constants.items() if name in kernel.arg_names}, divisible


def attention(
    kind: str, *, capability: int = 90, dtype: str = "bf16", cache: str | None = None, dim: int = 128, group: int = 4,
    page: int = 0, unit: int = 1, pooling: str = "", whole: bool = False, sinks: bool = False, capped: bool = False,
    joined: bool = False,
) -> Compiled:  # fmt: skip
    asked = {"whole": whole, "sinks": sinks, "turns": joined, "out": joined}
    absent = [name for name, there in asked.items() if not there]
    if kind == "dense":
        absent += SETS
    kernel, held = kernels._attend, cache or dtype
    signature, constants, divisible = describe(kernel, dtype, held, dim, group, page, pooling, tuple(absent))
    if kind == "dense":
        constants |= dict.fromkeys(SETS, 0) | {"ids": None, "counts": None}
    sizes = tuning(constants["INNER"], SIZES.get(held, 1))
    constants |= {"CAPPED": capped, "ALL": kind != "sparse", "LISTED": kind != "dense", "UNIT": unit}
    constants |= {"BLOCK": sizes.block, "STAGES": sizes.stages}
    how = {"capability": capability, "warps": sizes.warps, "stages": sizes.stages}
    return compile_kernel(kernels.__name__, "_attend", signature, constants, divisible, **how)


def expect_streaming(compiled: Compiled, registers: int) -> None:
    expect_fit(compiled, registers)
    # Copies of 16 bytes a thread, for keys and for values, before the loop and in it.
    assert len(re.findall(r"cp\.async\.cg\.shared\.global.*0x10", compiled.ptx)) >= 12
    assert any("cp.async.cg.shared" in loop and "mma.sync" in loop for loop in loops(compiled.ptx))


def loops(ptx: str) -> list[str]:
    """What lies between a label and a branch back to it."""
    heads = {label.group(1): label.end() for label in re.finditer(r"^(\$L__BB\d+_\d+):", ptx, re.MULTILINE)}
    branches = re.finditer(r"bra(?:\.uni)?\s+(\$L__BB\d+_\d+);", ptx)
    return [
        ptx[heads[branch.group(1)] : branch.start()] for branch in branches if heads[branch.group(1)] < branch.start()
    ]


@pytest.mark.parametrize(("kind", "capability"), in_turn(["dense", "sparse", "hybrid"], [90, 80]))
def test_llama_heads(kind: str, capability: int) -> None:
    expect_streaming(attention(kind, capability=capability), 168)


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("sparse", {"page": 16, "whole": True, "joined": True}),
    ("sparse", {"page": 16, "unit": 16, "sinks": True, "joined": True}),
    ("hybrid", {"page": 16, "pooling": "max", "whole": True}),
    ("hybrid", {"pooling": "mean", "group": 7}),
    ("sparse", {"dim": 80, "page": 32, "group": 1, "capped": True}),
    ("dense", {"cache": "fp8e5", "dtype": "fp16", "pooling": "each"}),
    # As vLLM's captured steps ask.
    ("sparse", {"cache": "fp8e4nv", "page": 16, "unit": 16, "whole": True}),
    ("hybrid", {"cache": "fp8e4nv", "page": 16, "pooling": "each", "whole": True, "dim": 64, "group": 7}),
]
"""Every option at least once."""


@pytest.mark.parametrize(("kind", "options"), SHAPES)
def test_other_shapes(kind: str, options: dict[str, Any]) -> None:
    quantised = options.get("cache", "bf16").startswith("fp8")
    registers = tuning(128, 1 if quantised else 2).registers
    if kind == "sparse" and not quantised:
        registers = min(registers, LISTED_REGISTERS)
    expect_streaming(attention(kind, **options), registers)


def test_single_precision_does_not_spill() -> None:
    """Its products are no tensor cores'."""
    assert attention("sparse", dtype="fp32").spilled == 0


@pytest.mark.parametrize("capability", DEVICES)
def test_scores_alone(capability: int) -> None:
    signature, constants, divisible = describe(scoring._score, "bf16", "bf16", 128, 4, 16, "max")
    sizes = tuning(128, 2)
    constants |= {"BLOCK": sizes.block, "STAGES": sizes.stages}
    how = {"capability": capability, "warps": sizes.warps, "stages": sizes.stages}
    compiled = compile_kernel(scoring.__name__, "_score", signature, constants, divisible, **how)
    expect_fit(compiled, 128)
    assert len(re.findall(r"cp\.async\.cg\.shared\.global.*0x10", compiled.ptx)) >= 12


@pytest.mark.parametrize(("width", "sinks"), in_turn([2, 32, 128], [None, "*bf16"]))
def test_joining(width: int, sinks: str | None) -> None:
    constants = {} if sinks is not None else {"sinks": None}
    constants |= {"out_dim": 1, "DIM": 128, "COLUMNS": min(128, combine.PART // width), "WIDTH": width}
    kinds = KINDS | {"out": "*bf16", "dense": "i64", "sinks": sinks or ""}
    signature = signature_of(combine._combine, kinds, constants)
    whole = ("parts", "sums", "out", "out_row", "out_head")
    compiled = compile_kernel(combine.__name__, "_combine", signature, constants, whole, capability=90)
    expect_fit(compiled, 128)


@pytest.mark.parametrize(
    ("queries", "group", "page", "dtype", "cache", "dim", "capability"),
    [
        (132, 4, 16, "bf16", "bf16", 128, 90),
        (264, 8, 0, "bf16", "bf16", 128, 90),
        (33, 1, 16, "bf16", "bf16", 128, 90),
        (132, 4, 0, "fp16", "fp16", 64, 80),
        (132, 4, 0, "bf16", "fp8e4nv", 128, 90),
        (132, 4, 0, "fp32", "fp32", 128, 80),
        (132, 4, 0, "bf16", "bf16", 256, 90),
    ],
)
def test_dense_pass(queries: int, group: int, page: int, dtype: str, cache: str, dim: int, capability: int) -> None:
    signature, constants, divisible = describe(dense_pass._attend, dtype, cache, dim, group, page, "")
    tile, sizes = dense_pass.tuning(queries, constants["INNER"], SIZES.get(cache, 1))
    constants |= {"TILE": tile, "BLOCK": sizes.block, "STAGES": sizes.stages}
    how = {"capability": capability, "warps": sizes.warps, "stages": sizes.stages}
    made = compile_kernel(dense_pass.__name__, "_attend", signature, constants, divisible, **how)
    if (dtype, cache, dim) == ("bf16", "bf16", 128):
        assert made.spilled == 0
        assert queries <= 64 or "wgmma" in made.ptx
