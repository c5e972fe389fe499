"""What a step launches, on tensors without content: no kernel that a request has to compile, and little of its own.

What vLLM runs is held against what the policy concerns: a layer without saccade's attention is an error, at once.
"""

from typing import Any

import cuda_engine
import pytest
import torch
import vllm
from cuda_engine import LAYERS, CudaEngine, Row
from engines import Engines, answers, core, greedy, prompts, runner
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from saccade.adapters.vllm.worker.requests import SERVING
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.errors import ServingError
from saccade.kernels import _dispatch
from saccade.kernels._triton import plan, refusals

ROWS = 8
LENGTHS = [1500, 120, 700, 300, 60, 900, 257, 2000]
UNION, TIDAL = "less_is_more:budget=256,reselect=7", "tidal:budget=256,reselect=7"
QUEST, RESA, STREAMING = "quest:budget=256", "resa:rectify=none", "streaming:budget=256"
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
        *(f"{policy}{cache}" for policy in (UNION, QUEST, RESA, STREAMING) for cache in ("", " in fp8")),
        *(TIDAL, "lychee_decode:budget=256,roles=every:4", "exact_topk:budget=256"),
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


@pytest.mark.parametrize(("policy", "most"), [(TIDAL, 16), (UNION, 16), (QUEST, 19), (RESA, 14)])
@torch.inference_mode()
def test_beside_attention_and_selection_a_step_launches_little(
    policy: str, most: int, launched: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each launch is a thousandth of a step of 2 ms. Ahead of a step there is none, but for vLLM's own schedule if
    layers are vLLM's; inside they count, as few for any number of layers."""
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
    assert ahead.names == []
    assert unscheduled[-1] is not any(engine.serving.plan.roles.passive)
    assert len(inside.names) <= most, inside.names


EVERY = ", ".join(map(str, range(LAYERS)))
PROMPT = [Row(0, 150, 150, True), Row(1, 99, 99, True)]
NEXT = [Row(0, 151), Row(1, 100)]


def said(layers: str, attention: str) -> str:
    told = f"vLLM {vllm.__version__} left saccade out of layers {layers} in a step that decodes under the policy "
    return f"{told}(attention there: {attention}): its answer would be dense"


def test_a_layer_that_attends_without_us_is_named(engines: Engines) -> None:
    engine = engines.sparse("quest:budget=64")
    config, stock = runner(engine).compilation_config, answers(engine, prompts(300), greedy(3))
    attended = serving_of(engine.llm_engine.vllm_config).attended
    assert (attended.due, attended.done) == (True, LAYERS)
    for numbers, told in (((5,), "5"), ((LAYERS - 1,), str(LAYERS - 1)), (range(LAYERS), EVERY)):
        left_out = [list(config.static_forward_context.values())[number].impl for number in numbers]
        for layer in left_out:
            layer.forward = lambda *given, output=None, **named: output
        with pytest.raises(ServingError) as refused:
            answers(engine, prompts(300, start=40), greedy(9))
        assert str(refused.value) == said(told, "SaccadeCPUAttention")
        for layer in left_out:
            del layer.forward
        # An engine that has raised is over; this one goes on as if it had not.
        engine.llm_engine.abort_request([*core(engine).scheduler.requests], internal=True)
        attended.due = False
    assert answers(engine, prompts(300), greedy(3)) == stock
    del vars(config)[SERVING]
    with pytest.raises(ServingError, match="no attention layer of saccade's"):
        answers(engine, prompts(300), greedy(3))


def run(engine: CudaEngine, rows: list[Row], *, warm: bool = False, layers: int = LAYERS) -> None:
    """One step, whose last layers may be somebody else's."""
    common = engine.metadata(rows)
    made = engine.builder.build_for_cudagraph_capture(common) if warm else engine.builder.build(0, common)
    whole, engine.layers = engine.layers, engine.layers[:layers]
    engine.layers_of(made, common, engine.random_qkv(common.num_actual_tokens)[:layers])
    engine.layers = whole


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaEngine:
    return CudaEngine(monkeypatch, "quest:budget=64,page=16")


def warm_up(engine: CudaEngine, *rows: Row, layers: int = LAYERS) -> None:
    """As vLLM captures a step: of requests that nobody has sent."""
    sent, engine.requests.rows = engine.requests.rows, {}
    run(engine, list(rows), warm=True, layers=layers)
    engine.requests.rows = sent


def test_a_replay_is_as_whole_as_its_capture(cuda: CudaEngine) -> None:
    warm_up(cuda, Row(0, 2), Row(1, 2))
    run(cuda, PROMPT)
    for _ in range(3):
        run(cuda, NEXT, layers=0)
    run(cuda, NEXT)
    # No graph holds three rows.
    run(cuda, [*NEXT, Row(2, 30)], layers=0)
    with pytest.raises(ServingError) as refused:
        run(cuda, NEXT)
    assert str(refused.value) == said(EVERY, "SaccadeFlashAttention")


@pytest.mark.parametrize("layers", [0, LAYERS - 2])
def test_a_capture_without_a_layer_is_an_error(cuda: CudaEngine, layers: int) -> None:
    warm_up(cuda, Row(0, 2), Row(1, 2), layers=layers)
    with pytest.raises(ServingError, match=f" {LAYERS - 2}, {LAYERS - 1} in a step"):
        run(cuda, PROMPT)


def test_steps_that_select_nothing_may_go_without_us(cuda: CudaEngine) -> None:
    run(cuda, PROMPT, layers=0)
    run(cuda, NEXT)
    run(cuda, NEXT, layers=LAYERS - 1)
    with pytest.raises(ServingError, match=f"layers {LAYERS - 1} in"):
        run(cuda, PROMPT)
