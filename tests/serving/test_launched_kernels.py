"""What a step launches, on tensors without content: no kernel that a request has to compile, and little of its own."""

from __future__ import annotations

from typing import Any

import cuda_engine
import pytest
import torch
from cuda_engine import CudaEngine, Row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from saccade.kernels import _dispatch
from saccade.kernels._triton import plan, refusals

ROWS = 8
LENGTHS = [1500, 120, 700, 300, 60, 900, 257, 2000]
Variant = tuple[Any, ...]


def variant(kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    """What Triton compiles a launch for: types, constants, which numbers are 1 or divisible by 16, and addresses so."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    kinds: list[Any] = [kernel.fn.__module__, kernel.fn.__name__]
    for parameter in kernel.params:
        value = given.pop(parameter.name)
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.storage_offset() * value.element_size() % 16 == 0))
        elif parameter.is_constexpr or value is None or isinstance(value, bool):
            kinds.append(value)
        elif isinstance(value, int) and not parameter.do_not_specialize:
            kinds.append("one" if value == 1 else value % 16 == 0)
        else:
            kinds.append(type(value))
    return (*kinds, tuple(sorted(given.items())))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """Of every launch from here on, which does nothing else; the device has as many processors as an H200."""
    seen: set[Variant] = set()

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.add(variant(self, args, options))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(refusals, "interpreting", lambda: True)  # kernels take tensors of any device then
    monkeypatch.setattr(_dispatch, "interpreting", lambda: False)
    monkeypatch.setattr(plan, "processors", lambda _: 132)
    # So long that neighbouring batches are cut into other numbers of parts.
    monkeypatch.setattr(cuda_engine, "MAX_LEN", 32768)
    return seen


@pytest.mark.parametrize(
    "policy",
    [
        "less_is_more:budget=256,reselect=7",
        "quest:budget=256",
        "lychee_decode:budget=256,roles=every:4",
        "tidal:budget=256,reselect=7",
        "streaming:budget=256",
        "resa:rectify=none",
        "exact_topk:budget=256",
        "less_is_more:budget=256,reselect=7 in fp8",
        "quest:budget=256 in fp8",
        "resa:rectify=none in fp8",
        "streaming:budget=256 in fp8",
    ],
)
@torch.inference_mode()
def test_a_step_with_a_prompt_launches_what_captured_ones_have_compiled(
    policy: str, launched: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of every size, those that no graph is captured for included, wherever the prompt stands in them."""
    policy, _, cache = policy.partition(" in ")
    engine = CudaEngine(monkeypatch, policy, device="meta", requests=ROWS, cache=cache or "auto")

    def step(rows: list[Row]) -> None:
        engine.step(rows, engine.random_qkv(sum(row.new for row in rows)))

    for size in (8, 4, 2, 1):
        step([Row(slot, LENGTHS[slot] + 1) for slot in range(size)])
    for length in (33, 700):
        step([Row(ROWS - 1, length, length, True)])
    compiled = set(launched)
    assert len({name for _, name, *_ in compiled}) >= (1 if policy.startswith("streaming") else 2)
    for size in range(1, ROWS):
        for length in (33, 700):
            prompt = Row(ROWS - 1, length, length, True)
            rows = [Row(slot, LENGTHS[slot] + 2) for slot in range(size)]
            step([*rows, prompt])
            step([prompt, *rows])
    assert launched - compiled == set()


class Operations(TorchDispatchMode):
    """Names of torch's that launch something: not of views, of memory that is not written, and of the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        there = any(isinstance(one, Tensor) and not one.is_cpu for one in tree_leaves(out))
        if there and not views and "empty" not in name:
            self.names.append(name)
        return out


@pytest.mark.parametrize(
    ("policy", "prepared", "most"),
    [
        ("tidal:budget=256,reselect=7", [], 16),
        ("less_is_more:budget=256,reselect=7", [], 16),
        ("quest:budget=256", ["sub"], 19),
        ("resa:rectify=none", ["sub"], 14),
    ],
)
@torch.inference_mode()
def test_beside_attention_and_selection_a_step_launches_little(
    policy: str, prepared: list[str], most: int, launched: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch is a thousandth of a step of 2 ms. Ahead of a step they say where new tokens begin, if bounds follow
    these, and vLLM's own schedule is made if layers are vLLM's; inside they count, as few for any number of layers."""
    engine, unscheduled = CudaEngine(monkeypatch, policy, device="meta", requests=ROWS), list[bool]()
    build = FlashAttentionMetadataBuilder.build

    def noting(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        unscheduled.append(fast_build)
        return build(self, common_prefix_len, common, fast_build)

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", noting)
    rows = [Row(slot, length + 1) for slot, length in enumerate(LENGTHS)]
    engine.step(rows, engine.random_qkv(ROWS))
    common, qkv = engine.metadata(rows), engine.random_qkv(ROWS)
    with Operations() as ahead:
        step = engine.builder.build(0, common)
    with Operations() as inside:
        engine.layers_of(step, common, qkv)
    assert ahead.names == prepared
    assert unscheduled[-1] is not any(engine.serving.plan.roles.passive)
    assert len(inside.names) <= most, inside.names
