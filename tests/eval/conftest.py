"""A tiny random model and the bundled tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from saccade.adapters.hf.load import ModelSource


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return ModelSource.locate(None).tokenizer()


@pytest.fixture(scope="session")
def model() -> Any:
    """Random weights, large ones, so that answers depend on what is attended to."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval()
