"""Bad input: one line that names the value and the valid ones, exit code 2, and no work before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Fails, Invoke, edited

Case = tuple[tuple[str, ...], tuple[str, ...]]

BAD_OPTIONS: list[Case] = [
    (("--policy", "tidal:budget"), ("'budget'", "key=value")),
    (("--policy", "quest:budget=8"), ("budget=8", "16")),
    (("--budget", "0"), ("'0'", "64,256")),
    (("--budget", "64,-1"), ("'-1'", "64,256")),
    (("--budget", "nan"), ("'nan'", "64,256")),
    (("--budget", "1.5"), ("'1.5'", "64,256")),
    (("--budget", ""), ("''", "64,256")),
    (("--policy", "streaming", "--budget", "2"), ("budget=2", "5")),
    (("--document", "absent.txt"), ("'absent.txt'",)),
    (("--document", "."), ("'.'",)),
    (("--context", "3"), ("'3'", "1024")),
    (("--context", "5000"), ("5000", "1600")),
    (("--context", "900000"), ("900000", "tokens")),
    (("--limit", "0"), ("'0'", "from 1")),
    (("--limit", "x"), ("'x'", "from 1")),
    (("--threads", "-1"), ("'-1'", "from 1")),
    (("--seed", "one"), ("'one'", "from 0")),
    (("--dtype", "float8"), ("'float8'", "float32, bfloat16, float16")),
    (("--output-dir", "/proc/saccade"), ("'/proc/saccade'",)),
    (("--nonsense",), ("--nonsense",)),
    (("--task", "rows.txt"), ("error: task file 'rows.txt' is neither .jsonl nor .parquet",)),
    (("--task", "none.parquet"), ("error: task file 'none.parquet' cannot be read: No such file or directory",)),
    (("--task", "a", "--document", "b"), ("error: --document and --task exclude each other: a task brings its own",)),
    (("--metric", "exact"), ("--metric scores the rows of a --task file",)),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda part: " ".join(part))
def test_bad_options(
    fails: Fails, model_folder: Path, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    results = tmp_path / "results"
    fixed = ("--model", model_folder, "--context", 1024)
    line = fails("compare", *fixed, "--output-dir", results, *options)
    assert all(word in line for word in words), line
    assert not results.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
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


def test_an_output_folder_that_is_a_file(fails: Fails, model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    line = fails("compare", "--model", model_folder, "--context", 1024, "--output-dir", file)
    assert str(file) in line


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
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
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
    for command in (("compare", "--output-dir", tmp_path / "results"), ("generate", "a prompt")):
        line = fails(*command, "--model", folder)
        assert str(folder) in line
        assert words in line
    assert not (tmp_path / "results").exists()


def test_weights_that_do_not_fit_the_configuration(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    def deepen(folder: Path) -> None:
        edited(folder / "config.json", num_hidden_layers=6, layer_types=["full_attention"] * 6)

    result = invoke("generate", "a prompt", "--model", broken(model_folder, tmp_path, deepen))
    assert result.exit_code == 2
    assert "lack" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_unknown_commands(fails: Fails) -> None:
    assert "compar" in fails("compar")
