"""A tiny random model in a folder, as users give it to the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner, Result

from saccade.adapters.hf.load import ModelSource
from saccade.cli import app

LAYERS = 5
POSITIONS = 1600

Invoke = Callable[..., Result]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large ones, so that answers depend on what is attended to; the bundled model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = ModelSource.locate(None).tokenizer()
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def invoke() -> Invoke:
    """Run the command line in this process."""

    def run(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run
