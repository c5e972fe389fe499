"""Bad files, models and texts: one line that names the file and what is wrong with it, and no work before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Fails, Invoke, edited, refusal
from one_line import lacking


def test_bad_documents(fails: Fails, model_folder: Path, tmp_path: Path) -> None:
    document, asked = (
        tmp_path / "document.txt",
        ("compare", "--model", model_folder, "--output-dir", tmp_path / "results"),
    )

    def line(content: bytes) -> str:
        document.write_bytes(content)
        return fails(*asked, "--document", document)

    refused = {
        b" \n": "empty",
        b"caf\xe9. And more.": "not UTF-8: byte 3",
        b"no sentence ends here": "no sentence",
        b"This one is too long. " * 400: "1600 positions",
    }
    assert lacking((line(content), (str(document), words)) for content, words in refused.items()) == []


def broken(model_folder: Path, tmp_path: Path, damage: Callable[[Path], object]) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    damage(folder)
    return folder


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def shards(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors").rename(folder / "model-1")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def forget_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nonsense"}'), "configuration"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}'), "no plain decoder"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "model.safetensors"),
        (truncate, "truncated"),
        (forget_tokenizer, "tokenizer"),
        (lambda folder: edited(folder / "tokenizer_config.json", eos_token=None), "eos_token"),
        (lambda folder: edited(folder / "config.json", vocab_size=2047), "2047 embeddings"),
        (lambda folder: edited(folder / "config.json", model_type="a", auto_map={"AutoConfig": "a.B"}), "custom code"),
        (lambda folder: shards(folder, {}), "no weight_map"),
        (lambda folder: shards(folder, {"a": "model-1", "b": "model-2"}), "model-2"),
    ],
)
def test_bad_model_folders(
    fails: Fails, model_folder: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = broken(model_folder, tmp_path, damage)
    line = fails("generate", "a prompt", "--model", folder)
    assert str(folder) in line and words in line


def test_weights_that_do_not_fit_the_configuration(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    def deepen(folder: Path) -> None:
        edited(folder / "config.json", num_hidden_layers=6, layer_types=["full_attention"] * 6)

    assert "lack" in refusal(invoke("generate", "a prompt", "--model", broken(model_folder, tmp_path, deepen)))
