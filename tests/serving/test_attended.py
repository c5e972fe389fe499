"""What vLLM runs is held against what the policy concerns: a layer without saccade's attention is an error, at once."""

from __future__ import annotations

import pytest
import vllm
from cuda_engine import LAYERS, CudaEngine, Row
from engines import Engines, answers, core, greedy, prompts, runner

from saccade.adapters.vllm.worker.requests import SERVING, RequestRows
from saccade.adapters.vllm.worker.worker import serving_of
from saccade.errors import ServingError

EVERY = ", ".join(map(str, range(LAYERS)))
PROMPT = [Row(0, 150, 150, True), Row(1, 99, 99, True)]
NEXT = [Row(0, 151), Row(1, 100)]


def said(layers: str, attention: str) -> str:
    return (
        f"vLLM {vllm.__version__} left saccade out of layers {layers} in a step that decodes under the policy "
        f"(attention there: {attention}): its answer would be dense"
    )


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
    engine = CudaEngine(monkeypatch, "quest:budget=64,page=16")
    assert isinstance(engine.requests, RequestRows)
    return engine


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
