"""Bad files, models and texts: one line that names the file and what is wrong with it, and no work before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Fails, Invoke, edited, refusal


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b" \n", "empty"),
        (b"caf\xe9. And more.", "not UTF-8: byte 3"),
        (b"no sentence ends here", "no sentence"),
        (b"This one is too long. " * 400, "1600 positions"),
    ],
)
def test_bad_documents(fails: Fails, model_folder: Path, tmp_path: Path, content: bytes, words: str) -> None:
    document = tmp_path / "document.txt"
    document.write_bytes(content)
    line = fails("compare", "--model", model_folder, "--document", document, "--output-dir", tmp_path / "results")
    assert str(document) in line
    assert words in line


def broken(model_folder: Path, tmp_path: Path, damage: Callable[[Path], object]) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    damage(folder)
    return folder


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def lie_about_the_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes((10**15).to_bytes(8, "little") + weights.read_bytes()[8:])


def lie_about_offsets(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    next(entry for name, entry in header.items() if name != "__metadata__")["data_offsets"][1] += 2
    changed = json.dumps(header).encode()
    weights.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])


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
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "truncated"),
        (truncate, "truncated"),
        (lie_about_the_header, "truncated"),
        (lie_about_offsets, "truncated"),
        (forget_tokenizer, "tokenizer"),
        (lambda folder: edited(folder / "tokenizer_config.json", eos_token=None), "eos_token"),
        (lambda folder: edited(folder / "config.json", vocab_size=100), "100 embeddings"),
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
