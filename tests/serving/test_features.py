"""What production asks of vLLM beside tokens: under a budget that covers, by our own path, it is what stock answers."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from engines import Engines, answers, core, force_own_path, greedy, prompt_of, prompts
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from saccade.checkpoints.bundled import model_path

COVERED, SPARSE = "quest:budget=4096,rectify=6", "quest:budget=64,rectify=6"
SETTINGS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "scheduling_policy": "priority",
    "enable_prefix_caching": True,
    "max_model_len": 1024,
}
WIDE = {"type": "object", "properties": {"city": {"type": "string"}, "size": {"type": "integer"}}, "required": ["city"]}
SHAPES: dict[str, dict[str, Any]] = {
    "JSON schema": {"json": WIDE},
    "regex": {"regex": "[0-9]{3}-[a-c]{2}"},
    "choice": {"choice": ["yes", "no"]},
    "grammar": {"grammar": 'root ::= "a" | "b" root'},
}

Said = list[tuple[int, ...]]


@cache
def adapter(number: int) -> LoRARequest:
    """Of random weights, in PEFT's format, large enough to change what is said."""
    config, rng = AutoConfig.from_pretrained(model_path()), torch.Generator().manual_seed(number)
    width = config.hidden_size // config.num_attention_heads
    weights, folder = dict[str, torch.Tensor](), Path(mkdtemp())
    for layer in range(config.num_hidden_layers):
        for name, heads in (("q_proj", config.num_attention_heads), ("v_proj", config.num_key_value_heads)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = 0.1 * torch.randn(4, config.hidden_size, generator=rng)
            weights[f"{place}.lora_B.weight"] = 0.3 * torch.randn(heads * width, 4, generator=rng)
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "task_type": "CAUSAL_LM"}), encoding="utf-8")
    return LoRARequest(str(number), number, str(folder))


def said(engine: LLM, **given: Any) -> Said:
    asked = [prompt_of(ids) for ids in prompts(200, 90, 150)]
    outputs = engine.generate(asked, greedy(16), use_tqdm=False, **given)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def shaped(engine: LLM) -> dict[str, list[str]]:
    """Answers of a given form, alone and in one batch with one that is free."""
    found = dict[str, list[str]]()
    for name, shape in SHAPES.items():
        settings = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(**shape))
        given = [settings, greedy(40), settings]
        outputs = engine.generate([prompt_of(ids) for ids in prompts(200, 90, 150)], given, use_tqdm=False)
        found[name] = [output.outputs[0].text for output in outputs]
    return found


def beams(engine: LLM) -> list[list[list[int]]]:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    outputs = engine.beam_search([prompt_of(ids) for ids in prompts(120, 60)], params)
    return [[beam.tokens[-8:] for beam in output.sequences] for output in outputs]


def slept(engine: LLM) -> None:
    """What a CPU build does of it: nothing runs in between, and the cache is forgotten."""
    engine.sleep(level=1)
    assert core(engine).is_sleeping()
    assert engine.wake_up() and not core(engine).is_sleeping()


def again(engine: LLM, change: Callable[[LLM], Any]) -> list[Said]:
    """Before and after a change that should change nothing."""
    before = said(engine)
    change(engine)
    return [before, said(engine)]


FEATURES: dict[str, Callable[[LLM], Any]] = {
    "no adapter": said,
    "one adapter": lambda engine: said(engine, lora_request=adapter(1)),
    "two adapters": lambda engine: said(engine, lora_request=[adapter(1), adapter(2), adapter(1)]),
    "structured output": shaped,
    "beams": beams,
    "priority": lambda engine: said(engine, priority=[2, 0, 1]),
    "prefix reset": lambda engine: again(engine, LLM.reset_prefix_cache),
    "sleep": lambda engine: again(engine, slept),
    "weights read again": lambda engine: again(engine, lambda one: one.collective_rpc("reload_weights")),
}


def by_stock(engine: LLM) -> dict[str, Any]:
    return {name: ask(engine) for name, ask in FEATURES.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_stock_answers(feature: str, all_engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = all_engines.by_stock(by_stock, **SETTINGS)
    force_own_path(monkeypatch)
    assert FEATURES[feature](all_engines.visit(COVERED, **SETTINGS)) == expected[feature]
    plain, one, two = (expected[name] for name in ("no adapter", "one adapter", "two adapters"))
    assert all(mine != other for mine, other in zip(plain, one, strict=True)), "an adapter changes what is said"
    assert (two[0], two[2]) == (one[0], one[2]) and two[1] not in (plain[1], one[1])
    assert expected["priority"] == plain


@pytest.mark.walk
def test_sparse_answers_keep_their_adapters_and_forms(all_engines: Engines) -> None:
    """Together as alone, whichever of them is free."""
    engine = all_engines.visit(SPARSE, **SETTINGS)
    one, two = (said(engine, lora_request=adapter(number)) for number in (1, 2))
    both = said(engine, lora_request=[adapter(1), adapter(2), adapter(1)])
    assert both == [one[0], two[1], one[2]] and said(engine) != both
    found = shaped(engine)
    free = answers(engine, prompts(200, 90)[1:], greedy(40))[0].tokens
    for texts in found.values():
        assert texts[1] == engine.get_tokenizer().decode(free)
    assert all(text in SHAPES["choice"]["choice"] for text in found["choice"][::2])
    assert all(re.fullmatch(SHAPES["regex"]["regex"], text) for text in found["regex"][::2])
    changed = [again(engine, change)[1] for change in (LLM.reset_prefix_cache, slept)]
    assert [*changed, said(engine, priority=[2, 0, 1])] == [said(engine)] * 3
