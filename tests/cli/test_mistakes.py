"""What newcomers get wrong, and bad files: exit code 2 and one line with the value and the next step, before work."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DeepseekV2Config, MistralConfig, Qwen3NextConfig

from commands import Fails, Invoke, edited, refusal, write_model
from one_line import lacking
from saccade.calibrate.ledger import Ledger
from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.load import ModelSource, skeleton_of
from saccade.eval import subject
from walking import among

COMMANDS = {
    "generate": ("generate", "a prompt"),
    "compare": ("compare", "--context", "1024"),
    "tune": ("tune", "--context", "512"),
    "calibrate layers": ("calibrate", "layers", "--context", "1024"),
    "policies": ("policies", "--cost"),
}
"""Commands that take a model, and what they are given beside it."""
WITH_FOLDER = ("compare", "tune", "calibrate layers")

MISTAKES: dict[str, dict[str, tuple[str, ...]]] = {
    "generate": {
        "--polcy tidal": ("--polcy", "--policy"),
        "--policy tidal:reselect=99": ("reselect=99", "valid layers are 2 to 4"),
        "--budget 8,16": ("8,16",),
        "--device quantum": ("'quantum'", "valid here: auto, cpu", "saccade doctor"),
        "--model ./nowhere": ("'./nowhere' does not exist", "OWNER/NAME"),
        "--document absent.txt": ("'absent.txt'",),
        "--max-new-tokens 9000": ("9000 new ones", "1600 positions", "shorten it", "--max-new-tokens"),
        "--temperature -1": ("--temperature -1", "0, which is greedy"),
        "--temperature warm": ("--temperature", "'warm'", "a number"),
    },
    "compare": {
        "--policy tidal:reselect=99": ("reselect=99", "valid layers are 2 to 4"),
        "--policy recipe:qwen-8b": ("recipe:qwen-8b", "did you mean qwen3-8b?"),
        "--policy streaming --budget 2": ("budget=2", "5"),
        "--budget 64,-1": ("'-1'", "64,256"),
        "--dtype int3": ("'int3'", "float32, bfloat16, float16"),
        f"--model {__file__}": (__file__, "is a file; give the folder"),
        "--document .": ("'.'",),
        "--context 5000": ("5000", "1600"),
        "--context 900000": ("900000", "tokens"),
        "--task a --document b": ("--document and --task exclude each other: a task brings its own",),
        "--metric exact": ("--metric scores the rows of a --task file",),
        "--context 3": ("'3'", "1024"),
        "--limit 0": ("'0'", "from 1"),
        "--output-dir /proc/saccade": ("'/proc/saccade'",),
        f"--output-dir {__file__}": (__file__,),
    },
    "tune": {
        "--policy tidal:reselect=2,3": ("'3' is not key=value", "lists with +"),
        "--policy auto": ("unknown policy 'auto'", "recipes are for decoding"),
        f"--model {Path(__file__).parent}": ("no config.json", "save_pretrained"),
    },
    "calibrate layers": {
        "--policy tidal:reselect=9": ("'tidal:reselect=9'", "leave them out"),
        "--model no-one/nothing": ("'no-one/nothing'", "network, or give a folder"),
    },
    "calibrate heads": {"--lengths 300,200": ("--lengths '300,200'", "1024,10240")},
    "policies": {
        "--policy tidal:budget=0": ("budget='0'", "must be at least 1"),
        "--policy auto": ("policy 'auto'", "saccade calibrate layers --model"),
        "--dtype int4": ("'int4'", "bf16"),
        "--model absent": ("'absent'", "llama-3.1-8b"),
        "--context -1": ("'-1'", "from 0"),
    },
    "bench decode": {
        "--policy tidl": ("unknown policy 'tidl'", "did you mean tidal?"),
        "--shape llama": ("'llama'", "llama-3.1-8b"),
        "--shape gemma-3-12b:49": ("'gemma-3-12b:49' is not valid", "gemma-3-12b:LAYERS, 1 to 48 layers"),
        "--shape gpt-oss-20b:8:3": ("gpt-oss-20b:LAYERS:EXPERTS, 1 to 24 layers and 4 to 32 experts",),
        "--dtype int8": ("float32, bfloat16, float16",),
        "--steps few": ("--steps", "'few'", "whole numbers from 2"),
        "--context -1": ("whole numbers of at least 0",),
    },
    "generat": {"": ("'generat'", "Did you mean 'generate'?")},
    "bench serv": {"": ("'serv'", "'serve'")},
}
"""Each mistake once, and of each command that it looks at its policies and its model."""


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_in_one_line(fails: Fails, model_folder: Path, tmp_path: Path, command: str) -> None:
    def line(given: str) -> str:
        model = ("--model", model_folder) if command in COMMANDS and "--model" not in given else ()
        folder = ("--output-dir", tmp_path / "out") if command in WITH_FOLDER and "--output-dir" not in given else ()
        return fails(*COMMANDS.get(command, command.split()), *model, *folder, *given.split())

    assert lacking((line(given), words) for given, words in MISTAKES[command].items()) == []
    assert command != "compare" or not (tmp_path / "out").exists()


def test_what_is_missing_is_said(fails: Fails, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = fails("generate", " ", "--model", model_folder)
    assert "the prompt is empty" in line and "standard input" in line
    line = fails("policies", "--policy", "quest")
    assert "--policy" in line and "--cost" in line
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    line = fails("bench", "serve")
    assert "vLLM is not installed" in line and '".[vllm]"' in line


bench = import_module("saccade.cli.bench")  # whose name in the package is the command's


@pytest.mark.parametrize(
    ("given", "file"),
    among([((), "probe.jsonl"), (("--task", "kv", "--questions", 2), "answers.jsonl")], [((), "probe.jsonl")]),
)
def test_a_results_folder_that_holds_another_run(
    invoke: Invoke, model_folder: Path, tmp_path: Path, given: tuple[object, ...], file: str
) -> None:
    """Even if that was interrupted before its first record."""

    def entered(ledger: Ledger) -> Ledger:
        if ledger.path.name == file:
            raise KeyboardInterrupt
        return ledger

    fixed = ("calibrate", "layers", "--model", model_folder, "--budgets", 64, "--passages", 1, *given)
    fixed = (*fixed, "--output-dir", tmp_path)
    with patch.object(Ledger, "__enter__", entered):
        assert invoke(*fixed, "--context", 802).exit_code == 130
    assert (tmp_path / file).is_file()
    line = refusal(invoke(*fixed, "--context", 900))
    assert "holds a run with context=802, this one has 900; choose another --output-dir" in line


def refused_model(folder: Path, config: Any) -> Path:
    """A model's folder whose weights nobody may read."""
    config.architectures = [type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder)
    return folder


RECURRENT = ["linear_attention", "full_attention", "full_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1600,
}  # fmt: skip
LATENT = partial(DeepseekV2Config, **SIZES, kv_lora_rank=16)
WINDOWS = partial(MistralConfig, **SIZES, sliding_window=128)
HYBRID = partial(Qwen3NextConfig, **SIZES, layer_types=RECURRENT)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LATENT, ("DeepseekV2ForCausalLM", "kv_lora_rank=16: multi-head latent attention")),
        (WINDOWS, ("none of its layers has full attention: sliding_attention; if you never exceed the window",)),
    ],
    ids=["latent", "windows"],
)
def test_a_type_of_model_that_is_refused(fails: Fails, tmp_path: Path, config: Any, words: tuple[str, ...]) -> None:
    line = fails("generate", "x", "--model", refused_model(tmp_path / "model", config()))
    assert all(word in line for word in words), line


def test_recurrent_layers_are_not_rectified(fails: Fails, tmp_path: Path) -> None:
    folder = refused_model(tmp_path / "model", HYBRID())
    asked = [(*COMMANDS[command], "--model") for command in ("generate", "compare", "tune", "calibrate layers")]
    asked.append(("bench", "decode", "--context", "0", "--shape"))
    given = (folder, "--device", "cpu", "--policy", "tidal:dense_layers=0,rectify=4")
    words = "rectification takes tokens back, and layers of type linear_attention have forgotten", "use rectify=none"
    assert lacking((fails(*command, *given), words) for command in asked) == []


BENCH = ("bench", "decode", "--shape", "smollm2-135m", "--context", "0,4096", "--batch", "1,4", "--device", "cpu")


@pytest.mark.parametrize(
    ("command", "beside"),
    [("generate", 0), *((command, 2**16) for command in ("generate", "compare", "tune", "calibrate layers", "bench"))],
)
def test_too_little_memory_is_known_before(
    fails: Fails, model_folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, beside: int
) -> None:
    """One byte less than the weights take, or room for few tokens beside them."""
    weights = sum(one.numel() for one in skeleton_of(ModelSource.locate(model_folder).config(), None).parameters()) * 4
    # A token takes 5 layers of 2 KV heads of 16 numbers, of keys and of values.
    given, token = (*COMMANDS.get(command, ()), "--model", model_folder, "--dtype", "float32"), 5 * 2 * 16 * 2 * 4
    if command == "generate":
        given = (*given, "--max-new-tokens", 1000)
    if command == "bench":
        given, weights, token = BENCH, 134_515_008 * 2, 30 * 3 * 64 * 2 * 2 * 4  # of 4 rows
    monkeypatch.setattr(subject, "free_memory", lambda _: weights - 1 + beside)
    line = fails(*given)
    assert "GiB on cpu" in line and "GiB are free" in line
    room = (beside - 1) // token
    assert (f"at most {room} tokens fit" in line) == (room > 0)
    assert ("take a smaller model or dtype" in line) == (room <= 0)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("64 bytes"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. Error code 12"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes. GPU 0 has"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_runs_out_is_no_traceback(
    invoke: Invoke, model_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelSource, "weights", full)
    line = refusal(invoke(*COMMANDS["generate"], "--model", model_folder))
    assert line.startswith("saccade: error: memory ran out; take a smaller context, batch or dtype")
    assert "Error code" not in line


@pytest.mark.parametrize(
    "given", [("--dtype", "fp16"), ("--budget", "1000000"), ("--policy", " tidal : reselect = 3 ")], ids=" ".join
)
def test_what_is_plain_enough_is_done(invoke: Invoke, model_folder: Path, given: tuple[str, ...]) -> None:
    result = invoke(*COMMANDS["generate"], "--model", model_folder, "--max-new-tokens", 4, *given)
    assert result.exit_code == 0, result.output


def test_a_model_without_a_chat_template_is_given_the_prompt_as_it_is(invoke: Invoke, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    edited(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert invoke(*COMMANDS["generate"], "--model", folder, "--max-new-tokens", 4).exit_code == 0


def test_a_group_without_a_command_shows_its_help(invoke: Invoke) -> None:
    for group in ((), ("bench",), ("calibrate",)):
        result = invoke(*group)
        assert (result.exit_code, result.stderr) == (0, "") and "Commands" in result.stdout


def test_bad_documents(fails: Fails, model_folder: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    asked = ("compare", "--model", model_folder, "--output-dir", tmp_path / "results")

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
