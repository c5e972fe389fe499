"""A command line run in this process, and a tiny random model in a folder, as users give it to one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer import Typer
from typer.testing import CliRunner, Result

from saccade.checkpoints.load import ModelSource
from saccade.cli import app as saccade_app

LAYERS = 5
POSITIONS = 1600

Invoke = Callable[..., Result]
Fails = Callable[..., str]


def invoker(app: Typer) -> Invoke:
    def run(*arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture
def invoke() -> Invoke:
    """Run `saccade`'s command line; a folder of tests may have another one's."""
    return invoker(saccade_app)


@pytest.fixture
def fails(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Run a command line that must fail before any work, in one line on stderr and with exit code 2; gives the line."""

    def no_work(*arguments: object) -> None:
        raise AssertionError("weights were loaded before the input was checked")

    monkeypatch.setattr(ModelSource, "weights", no_work)

    return lambda *arguments: refusal(invoke(*arguments))


def refusal(result: Result) -> str:
    """The one line on stderr of a command that ended with exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("saccade: error: ")
    return str(line)


def told(result: Result, file: Path, picture: Path, *, interrupted: bool = False) -> dict[str, Any]:
    """What a command has written down; its picture is whole, and that it was interrupted is said if it was."""
    assert result.exit_code == (130 if interrupted else 0), result.output
    assert any(line.startswith("interrupted") for line in result.stdout.splitlines()) == interrupted
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    results: dict[str, Any] = json.loads(file.read_text())
    assert results["complete"] is not interrupted
    return results


def first_alone(draw: Callable[[Any], str]) -> Callable[[Any], str]:
    """Draws the first figure; of others, which take seconds and are as the tests of pictures find them, nothing."""
    drawn = iter([draw])
    return lambda figure: next(drawn, lambda _: "<svg/>")(figure)


def edited(file: Path, **changes: Any) -> None:
    """Give a JSON file other values."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def tiny_model(
    tokenizer: Any, positions: int = 2**15, *, layers: int = LAYERS, kv_heads: int = 2, dim: int = 16, seed: int = 0
) -> Qwen3ForCausalLM:
    """Random weights, large ones, so that answers depend on what is attended to; 4 query heads, which C takes."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=positions,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.eval()
    return model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """That of the bundled model."""
    return ModelSource.locate(None).tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Qwen3ForCausalLM:
    return tiny_model(tokenizer)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(folder: Path, positions: int = POSITIONS, **sizes: int) -> Path:
    """A tiny model with the bundled model's tokenizer."""
    tokenizer = ModelSource.locate(None).tokenizer()
    tiny_model(tokenizer, positions, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
