"""Decoders of models that read images: a prompt with an image is a prompt like another, and what sees is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
)

import saccade
from forcing import sparse_below_the_budget

from . import tiny

IMAGE, PATCHES, NEW = 63, 4, 8
SIGHT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 28, "patch_size": 14, "initializer_range": 0.3},
}
TEXT = {**tiny.SIZES, "head_dim": 8}


def llava() -> PreTrainedModel:
    parts = {"text_config": LlamaConfig(**TEXT), "vision_config": CLIPVisionConfig(**SIGHT)}
    return LlavaForConditionalGeneration(LlavaConfig(**parts, image_token_index=IMAGE, initializer_range=0.3))


def gemma() -> PreTrainedModel:
    """Layers of two kinds, and patches of an image that see each other."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    text = Gemma3TextConfig(**{**TEXT, "sliding_window": 8, "layer_types": kinds})
    config = Gemma3Config(
        **{"text_config": text, "vision_config": SiglipVisionConfig(**SIGHT), "mm_tokens_per_image": PATCHES},
        **{"image_token_index": IMAGE, "boi_token_index": 61, "eoi_token_index": 62, "initializer_range": 0.3},
    )
    model = Gemma3ForConditionalGeneration(config)
    # transformers starts it at 0, and no image would count.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    return model


MODELS = {"llava": llava, "gemma3": gemma}


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def inputs(name: str, seed: int = 0) -> dict[str, Any]:
    words = torch.randint(2, 60, (2, 10), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([words[:1], torch.full((1, PATCHES), IMAGE), words[1:]], dim=1)
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(seed))
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    return {**found, "token_type_ids": (ids == IMAGE).long()} if name == "gemma3" else found


def logits(model: PreTrainedModel, given: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    options = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    answer = model.generate(**given, **options)
    return answer.sequences[0].tolist(), torch.cat(answer.logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_with_an_image(name: str) -> None:
    """Stock's tokens above the budget; below it other logits; the image counts, and its side keeps its attention."""
    model, given = made(name), inputs(name)
    tokens, stock = logits(model, given)
    assert not torch.equal(logits(model, inputs(name, seed=1))[1][0], stock[0])
    last = model.config.get_text_config().num_hidden_layers - 1
    sight = {module.config._attn_implementation for module in model.modules() if "Vision" in type(module).__name__}
    with (
        sparse_below_the_budget(),
        saccade.sparsify(model, f"less_is_more:budget={tiny.LARGE},dense_layers=1,reselect={last}") as run,
    ):
        ours, found = logits(model, given)
        assert ours == tokens and run.stats().steps == NEW - 1
        for module in model.modules():
            if "Vision" in type(module).__name__:
                assert {module.config._attn_implementation} == sight
    # As far from stock as some hundred roundings of float32 take it.
    torch.testing.assert_close(found, stock, rtol=0, atol=float(stock.abs().max()) * 400 * 2.0**-24)
    with saccade.sparsify(model, "streaming:budget=9"):
        _, sparse = logits(model, given)
    assert torch.equal(sparse[0], stock[0]) and not torch.allclose(sparse[1:], stock[1:], atol=1e-3)
    assert torch.equal(logits(model, given)[1], stock)
