"""What production asks of vLLM, tokens and more: under a budget that covers it is what stock answers, also by our path.

Below it answers together are those alone. Also to prompts with images.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy
import pytest
import torch
from engines import Answer, Engines, answers, core, force_own_path, greedy, prompt_of, prompts
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from saccade.adapters.vllm.worker.page_bounds import BlockBounds
from saccade.checkpoints.bundled import model_path
from saccade.types import KVView
from walking import among

COVERED, SPARSE = "quest:budget=4096,rectify=6", "quest:budget=64,rectify=6"
SETTINGS: dict[str, Any] = {
    **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "scheduling_policy": "priority"},
    **{"enable_prefix_caching": True, "max_model_len": 1024},
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
    weights, folder = dict[str, Tensor](), Path(mkdtemp())
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


SIDE, PATCH, SCALE = 56, 4, 2
WITH_IMAGES: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "limit_mm_per_prompt": {"image": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolVLM's kind, small and random, with the bundled tokenizer."""
    folder: Path = tmp_path_factory.mktemp("images")
    images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    tokens = (SIDE // PATCH // SCALE) ** 2
    processor = Idefics3Processor(images, AutoTokenizer.from_pretrained(model_path()), image_seq_len=tokens)
    tokenizer = processor.tokenizer
    parts = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens, *parts, "<global-img>"]})
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 2}
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        scale_factor=SCALE,
        text_config={"model_type": "llama", "pad_token_id": 0, "max_position_embeddings": 2048, **sizes, **text},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "image_size": SIDE, "patch_size": PATCH, **sizes},
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def looked_at(seed: int = 0) -> list[Any]:
    """Prompts with two images, which are read in three steps, with one, and with none."""
    rng, asked = numpy.random.default_rng(seed), list[Any]()
    for text in ("<image> What is <image>?", "<image> is what?", "What is it?"):
        pixels = [rng.integers(0, 255, (SIDE, SIDE, 3), dtype=numpy.uint8) for _ in range(text.count("<image>"))]
        data = {"multi_modal_data": {"image": [Image.fromarray(one) for one in pixels]}} if pixels else {}
        asked.append({"prompt": text, **data})
    return asked


def seen(engine: LLM, asked: list[Any]) -> Said:
    found = engine.generate(asked, greedy(24), use_tqdm=False)
    assert "<image>" not in asked[0]["prompt"] or len(found[0].prompt_token_ids) > WITH_IMAGES["max_num_batched_tokens"]
    return [tuple(one.outputs[0].token_ids) for one in found]


@pytest.mark.walk
def test_prompts_with_images(model: str, all_engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": model, **WITH_IMAGES}
    expected, others = all_engines.by_stock(lambda one: [seen(one, looked_at(seed)) for seed in (0, 1)], **settings)
    assert expected[:2] != others[:2], "images are read"
    force_own_path(monkeypatch)
    assert seen(all_engines.visit("quest:budget=2048", **settings), looked_at()) == expected
    engine = all_engines.visit("quest:budget=64", **settings)
    sparse = seen(engine, looked_at())
    assert [seen(engine, [prompt])[0] for prompt in looked_at()] == sparse
    changed = [mine != other for mine, other in zip(sparse, expected, strict=True)]
    assert changed == [True, True, False], "rows with images are longer than their sets"


COVERING = (
    "dense",
    "quest:budget=4096,page=32,heads=query,rectify=6",
    "tidal:rule=ratio,ratio=1,reselect=7,rectify=5",
    "lychee_decode:budget=4096,roles=every:4",
    "lychee_cluster:budget=4096,rectify=8",
    "streaming:budget=4096",
    "less_is_more:budget=4096,reselect=7",
)
"""By kind, those first that are asked every time; others are those of test_one_engine."""
MIXED = (230, 17, 129, 64, 310, 33, 1, 145)
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_prefix_caching": True}


def told(engine: LLM) -> list[Answer]:
    return answers(engine, prompts(*MIXED), greedy(12))


@pytest.mark.parametrize("policy", among(COVERING, COVERING[:5]))
def test_tokens_are_those_of_stock(policy: str, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batches of 4 of 8 prompts, prefilled in chunks, by vLLM's path and by ours; float32, 1e-4."""
    expected = engines.by_stock(told, **CHUNKED)
    engine, bounded, update = engines.sparse(policy, **CHUNKED), list[int](), BlockBounds.update

    def noting(self: BlockBounds, kv: KVView, start: Tensor, count: int) -> None:
        # A prompt's last chunk may be one token too.
        bounded.extend(((start + 1) % self.page).tolist() if count == 1 else ())
        update(self, kv, start, count)

    monkeypatch.setattr(BlockBounds, "update", noting)
    for own_path in (False, True):
        if own_path:
            force_own_path(monkeypatch)
        found = told(engine)
        assert own_path or not any(bounded), "a page that is not full waits: it costs what stock's step costs"
        assert own_path or policy != "dense" or found == expected, "bit by bit"
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected], f"{own_path=}"
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
