"""Families that run, decoders that read images among them, and families refused with the reason before any work."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSeq2SeqLM,
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
from saccade.checkpoints.shape import shape_of

from . import tiny
from .checking import OracleObserver

MHA = {"num_key_value_heads": ...}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
    "gpt_neox": MHA,
    "opt": {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32, "hidden_size": 32},
    # Windows as wide as the positions never bind.
    "qwen3 with an idle window": {
        **{"head_dim": 8, "sliding_window": 256, "use_sliding_window": True, "max_window_layers": 2}
    },
}
"""One of each way in which models are built; test_model_types decodes with every type."""


def generate(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    return model.generate(**tiny.padded([24, 11]), do_sample=False, max_new_tokens=8, **options).tolist()


@functools.cache
def family(name: str) -> tuple[PreTrainedModel, list[list[int]]]:
    """A model that tests attach to and restore, and what it says by itself."""
    model = tiny.fresh(name.partition(" ")[0], **FAMILIES[name])
    return model, generate(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_decodes(name: str) -> None:
    """The stock tokens above the budget with the shortcut off, the oracle's sets below it."""
    model, stock = family(name)
    with sparse_below_the_budget(), saccade.sparsify(model, tiny.spec("less_is_more")):
        assert generate(model) == stock
        assert generate(model, cache_implementation="static") == stock
    spec = tiny.spec("less_is_more", 9)
    checker = OracleObserver(spec)
    with saccade.sparsify(model, spec, observers=(checker,)) as run:
        generate(model)
        assert run.stats().steps == 7 and checker.seen
    assert generate(model) == stock


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_rectified(name: str) -> None:
    """Stock tokens where rewriting changes nothing, and where a dense pass decides about every draft."""
    model, stock = family(name)
    with sparse_below_the_budget(), saccade.sparsify(model, "quest:page=4,budget=100,rectify=3") as run:
        assert generate(model) == stock
        assert run.stats().dense_passes == 1
    with saccade.sparsify(model, "quest:page=4,budget=4,dense_layers=0,rectify=3:verify") as run:
        assert generate(model) == stock
        assert run.stats().drafted > 0


def check_refusal(model: Any, reason: str) -> None:
    """One line with the reason, and nothing left on the model."""
    before = dict(vars(model)) if hasattr(model, "__dict__") else {}
    with pytest.raises(saccade.UnsupportedModelError, match=reason) as error:
        saccade.sparsify(model, "streaming:budget=16")
    assert "\n" not in str(error.value)
    assert dict(vars(model)) == before


WINDOWS = {layer: {"sliding_window": window} for layer, window in enumerate((256, 512, 300, 256))}


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="no configuration of this transformers does")
def test_layers_may_have_configurations_of_their_own() -> None:
    """Sizes that layers keep apart and that agree are one shape; a layer with a narrow window is left alone."""
    sizes = {"head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 64, "sliding_window": 256}
    narrow = tiny.fresh("mistral", per_layer_config={**WINDOWS, 2: {"sliding_window": 16}})
    assert shape_of(narrow.config).full_layers == (0, 1, 3)
    for model in (tiny.fresh("gemma4_text", **sizes), tiny.fresh("mistral", per_layer_config=WINDOWS), narrow):
        saccade.sparsify(model, tiny.spec("less_is_more")).restore()


def encoder_decoder() -> Any:
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)).eval()


def spread() -> Any:
    model = tiny.fresh()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny.fresh("mistral", sliding_window=16), "none of its layers has full attention: sliding_attention"),
        (lambda: tiny.fresh("falcon", attention="eager", alibi=True), "AttentionInterface"),
        (encoder_decoder, "encoder-decoder"),
        (spread, "its layers are spread over 0, disk, .* device_map=.cuda., .*--tensor-parallel-size"),
        (lambda: torch.nn.Linear(2, 2), "expected a loaded transformers model, got Linear"),
        (lambda: tiny.llama().model, "no language-model head"),
        # A policy is bound to the shape that the configuration gives.
        (lambda: tiny.fresh("gpt_neox"), "its configuration says 2"),
    ],
)
def test_a_model_of_another_kind_is_refused(make: Callable[[], Any], reason: str) -> None:
    check_refusal(make(), reason)


def test_quantized_cache_is_refused() -> None:
    from transformers.cache_utils import Cache, DynamicLayer

    class QuantizedLayer(DynamicLayer):
        """Stands for transformers' own, whose back ends are optional packages."""

    with (
        saccade.sparsify(tiny.llama(), "streaming:budget=16"),
        pytest.raises(saccade.UnsupportedModelError, match="cache layers of type QuantizedLayer"),
    ):
        tiny.llama()(tiny.prompt(), past_key_values=Cache(layers=[QuantizedLayer() for _ in range(4)]))


@pytest.mark.parametrize("told", ["generate_batch", "output_attentions"])
def test_what_generate_would_do_otherwise_is_refused(told: str) -> None:
    """Continuous batching, and weights of attention that a configuration asks for."""
    model = tiny.fresh(attention="eager", output_attentions=told == "output_attentions")
    with saccade.sparsify(model, "streaming:budget=16"), pytest.raises(saccade.UnsupportedModelError, match=told):
        model.generate_batch([[1, 2, 3]]) if told == "generate_batch" else generate(model)


def test_bad_policy_is_refused_before_the_model_is_touched() -> None:
    before = copy.copy(vars(tiny.llama()))
    for policy in (3, "quest:budget=3"):
        with pytest.raises(saccade.PolicyError):
            saccade.sparsify(tiny.llama(), policy)  # type: ignore[arg-type]
        assert vars(tiny.llama()) == before


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
