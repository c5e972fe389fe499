"""What a step moves beside keys and values, against models that ran and against sums by hand."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from adapters.ways import VERSION
from saccade.checkpoints.presets import read_config
from saccade.checkpoints.traffic import state_bytes, weights_read

SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3_next", torch.float32), *((name, torch.bfloat16) for name in RECURRENT if name in CONFIG_MAPPING)],
)
def test_states_are_those_of_a_cache_that_was_filled(name: str, dtype: torch.dtype) -> None:
    config = AutoConfig.for_model(name, **SIZES, **RECURRENT[name])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if VERSION < (5,):
        # A cache of its own there, or code that asks for numbers; of Jamba no configuration says its layers.
        assert state_bytes(config, dtype) == (0 if name == "jamba" else None)
        return
    rows = 3
    with torch.inference_mode():
        cache = model(torch.arange(21).reshape(rows, 7), use_cache=True).past_key_values
    sizes = list[int]()

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sizes.append(value.nbytes)
        elif isinstance(value, dict | list | tuple):
            for one in value.values() if isinstance(value, dict) else value:
                look(one)

    for layer, kind in zip(cache.layers, config.layer_types, strict=True):
        if kind != "full_attention":
            look(vars(layer))
    if name == "minimax":
        look([states for states in cache.linear_cache if len(states)])
    assert sizes and rows * (state_bytes(config, dtype) or 0) == sum(sizes)


def test_states_of_a_model_of_true_size_by_hand() -> None:
    """Qwen3-Next: 36 recurrent layers of 32 states of 128 by 128 in float32, and 4 inputs of 8,192 channels each."""
    config = AutoConfig.for_model("qwen3_next")
    states = 36 * (32 * 128 * 128 * 4 + 4 * 8192 * 2) if VERSION >= (5,) else None
    assert state_bytes(config, torch.bfloat16) == states
    assert state_bytes(read_config("gemma-3-12b"), torch.bfloat16) == 0
    assert state_bytes(read_config("llama-3.2-1b"), torch.bfloat16) == 0


def test_rows_read_the_experts_that_they_are_expected_to_choose() -> None:
    config = AutoConfig.for_model("mixtral", **SIZES, num_local_experts=8, num_experts_per_tok=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = 4 * 8 * 3 * 32 * 48
    others = sum(weight.numel() for weight in model.parameters()) - 61 * 32 - experts
    assert weights_read(model) == others + experts / 4
    # Two rows: the second finds a chosen one in one of four cases.
    assert weights_read(model, 2) == others + experts * 7 / 16
    # Which of 8 experts 3 rows miss, over all ways to choose two: (6/8)^3.
    assert weights_read(model, 3) == pytest.approx(others + experts * (1 - 0.75**3))
    assert weights_read(model, 10**6) == pytest.approx(others + experts)


def test_tied_and_plain_models() -> None:
    for tied in (True, False):
        config = AutoConfig.for_model("llama", **{**SIZES, "tie_word_embeddings": tied})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        table = model.get_input_embeddings().weight.numel()
        assert weights_read(model, 5) == sum(weight.numel() for weight in model.parameters()) - (0 if tied else table)
