"""Families that run, and families that are refused with the reason before any work."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

import saccade
from forcing import sparse_below_the_budget
from saccade.checkpoints.shape import shape_of

from . import tiny
from .checking import OracleObserver

MHA = {"num_key_value_heads": ...}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"head_dim": 16},
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
    "gpt_neox": MHA,
    "opt": {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32, "hidden_size": 32},
    # Windows as wide as the positions never bind; Phi-3-mini-128k is published that way.
    "phi3 with an idle window": {"sliding_window": 512},
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
    model = tiny.fresh("gemma4_text", **sizes)
    stock = generate(model)
    with sparse_below_the_budget(), saccade.sparsify(model, tiny.spec("less_is_more")):
        assert generate(model) == stock
    wide = tiny.fresh("mistral", per_layer_config=WINDOWS)
    with saccade.sparsify(wide, tiny.spec("less_is_more")):
        pass
    narrow = tiny.fresh("mistral", per_layer_config={**WINDOWS, 2: {"sliding_window": 16}})
    assert shape_of(narrow.config).full_layers == (0, 1, 3)
    with saccade.sparsify(narrow, tiny.spec("less_is_more")):
        pass


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


@pytest.mark.parametrize("policy", ["auto", 3, "quest:budget=3"])
def test_bad_policy_is_refused_before_the_model_is_touched(policy: Any) -> None:
    model = tiny.llama()
    before = copy.copy(vars(model))
    with pytest.raises(saccade.PolicyError) as error:
        saccade.sparsify(model, policy)
    assert "\n" not in str(error.value)
    assert vars(model) == before
