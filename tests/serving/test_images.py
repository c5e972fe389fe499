"""Prompts with images: under a budget that covers, by our own path, stock's tokens; below it together as alone."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engines import Engines, force_own_path, greedy
from PIL import Image
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vllm import LLM

from saccade.checkpoints.bundled import model_path

SIDE, PATCH, SCALE = 56, 4, 2
SETTINGS: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 256, "limit_mm_per_prompt": {"image": 2}}

Said = list[tuple[int, ...]]


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


def asked(seed: int = 0) -> list[Any]:
    """Prompts with two images, which are read in three steps, with one, and with none."""
    rng, prompts = numpy.random.default_rng(seed), list[Any]()
    for text in ("<image> What is <image>?", "<image> is what?", "What is it?"):
        pixels = [rng.integers(0, 255, (SIDE, SIDE, 3), dtype=numpy.uint8) for _ in range(text.count("<image>"))]
        data = {"multi_modal_data": {"image": [Image.fromarray(one) for one in pixels]}} if pixels else {}
        prompts.append({"prompt": text, **data})
    return prompts


def said(engine: LLM, prompts: list[Any]) -> Said:
    answers = engine.generate(prompts, greedy(24), use_tqdm=False)
    assert (
        "<image>" not in prompts[0]["prompt"] or len(answers[0].prompt_token_ids) > SETTINGS["max_num_batched_tokens"]
    )
    return [tuple(one.outputs[0].token_ids) for one in answers]


@pytest.mark.walk
def test_prompts_with_images(model: str, all_engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": model, **SETTINGS}
    expected, others = all_engines.by_stock(lambda engine: [said(engine, asked(seed)) for seed in (0, 1)], **settings)
    assert expected[:2] != others[:2], "images are read"
    force_own_path(monkeypatch)
    assert said(all_engines.visit("quest:budget=2048", **settings), asked()) == expected
    engine = all_engines.visit("quest:budget=64", **settings)
    sparse = said(engine, asked())
    assert [said(engine, [prompt])[0] for prompt in asked()] == sparse
    changed = [mine != other for mine, other in zip(sparse, expected, strict=True)]
    assert changed == [True, True, False], "rows with images are longer than their sets"
