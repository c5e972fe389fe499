"""What a newcomer gets wrong on the command line: exit code 2 and one line with the value and the next step."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DeepseekV2Config, MistralConfig, Qwen3NextConfig

from commands import Fails, Invoke, edited, write_model
from saccade.calibrate.ledger import Ledger
from saccade.checkpoints.bundled import model_path
from saccade.checkpoints.load import ModelSource
from saccade.eval import subject
from walking import among

GENERATE, COST = ("generate", "a prompt"), ("policies", "--cost")
COMMANDS = {
    "generate": GENERATE,
    "compare": ("compare", "--context", "1024"),
    "tune": ("tune", "--context", "512"),
    "calibrate layers": ("calibrate", "layers", "--context", "1024"),
    "policies": COST,
}

MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a typo in an option": (("--polcy", "tidal"), ("--polcy", "--policy")),
    "a typo in a policy": (("--policy", "tidl"), ("unknown policy 'tidl'", "did you mean tidal?")),
    "a typo in a policy's option": (("--policy", "tidal:budgt=9"), ("no option 'budgt'", "did you mean budget?")),
    "a list with commas": (("--policy", "tidal:reselect=2,3"), ("'3' is not key=value", "lists with +")),
    "a word for a budget": (("--policy", "tidal:budget=many"), ("budget='many'", "must be a whole number")),
    "no budget": (("--policy", "tidal:budget=0"), ("budget='0'", "must be at least 1")),
    "a layer that is not there": (("--policy", "tidal:reselect=99"), ("reselect=99", "valid layers are 2 to 4")),
    "a recipe that is not there": (("--policy", "absent.json"), ("absent.json", "No such file")),
    "a published recipe's typo": (("--policy", "recipe:qwen-8b"), ("recipe:qwen-8b", "did you mean qwen3-8b?")),
    "another model's recipe": (("--policy", "recipe:qwen3-8b"), ("belongs to another model", "layers=36", "layers=5")),
    "no recipe": (("--policy", "auto"), ("policy 'auto'", "saccade calibrate layers --model")),
    "an unknown device": (("--device", "quantum"), ("'quantum'", "valid here: auto, cpu", "saccade doctor")),
    "an unknown dtype": (("--dtype", "int3"), ("'int3'", "float32")),
    "a model that is not there": (("--model", "./nowhere"), ("'./nowhere' does not exist", "OWNER/NAME")),
    "a model that is a file": (("--model", __file__), (__file__, "is a file; give the folder")),
    "a folder that is no model": (("--model", str(Path(__file__).parent)), ("no config.json", "save_pretrained")),
    "a hub id without a network": (("--model", "no-one/nothing"), ("'no-one/nothing'", "network, or give a folder")),
}
RECIPES = ("a recipe that is not there", "a published recipe's typo", "another model's recipe", "no recipe")
MEANT_FOR_OTHERS = {
    "policies": ("an unknown device", "a model that is a file", "a folder that is no model", "another model's recipe"),
    "tune": RECIPES,
    "calibrate layers": (*RECIPES, "a layer that is not there"),
}
"""What a command does not take, or takes for something else."""


@pytest.mark.parametrize(
    ("command", "mistake"),
    [(command, one) for command in COMMANDS for one in MISTAKES if one not in MEANT_FOR_OTHERS.get(command, ())],
)
def test_a_mistake_is_answered_in_one_line(
    fails: Fails, model_folder: Path, tmp_path: Path, command: str, mistake: str
) -> None:
    given, words = MISTAKES[mistake]
    given = given if "--model" in given else (*given, "--model", str(model_folder))
    given = (*given, "--output-dir", str(tmp_path / "out")) if command in ("compare", "tune", "calibrate") else given
    line = fails(*COMMANDS[command], *given)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*GENERATE, "--max-new-tokens", "9000"), ("9000 new ones", "1600 positions", "--max-new-tokens")),
        (("generate", "word " * 2000), ("1600 positions", "shorten it")),
        (("generate", " "), ("the prompt is empty", "standard input")),
        ((*GENERATE, "--temperature", "-1"), ("--temperature -1", "0, which is greedy")),
        ((*GENERATE, "--temperature", "warm"), ("--temperature", "'warm'", "a number")),
        ((*GENERATE, "--budget", "many"), ("budget 'many'", "whole numbers")),
        ((*GENERATE, "--budget", "0"), ("'0'",)),
        ((*GENERATE, "--budget", "8,16"), ("8,16",)),
        ((*GENERATE, "--document", "absent.txt"), ("'absent.txt'",)),
        ((*COST, "--context", "-1"), ("'-1'", "from 0")),
        ((*COST, "--batch", "0"), ("'0'", "from 1")),
        ((*COST, "--dtype", "int4"), ("'int4'", "bf16")),
        ((*COST, "--weights", "two"), ("'two'", "int4")),
        ((*COST, "--acceptance", "1.5"), ("acceptance=1.5", "0 to 1")),
        ((*COST, "--acceptance", "nan"), ("acceptance=nan", "0 to 1")),
        ((*COST, "--policy", "foo"), ("'foo'", "quest")),
        ((*COST, "--model", "absent"), ("'absent'", "llama-3.1-8b")),
        (("policies", "--batch", "8"), ("--batch", "--cost")),
        (("policies", "--model", "llama-3.1-8b"), ("--model", "--cost")),
        (("policies", "--policy", "quest"), ("--policy", "--cost")),
        (("tune", "--quality", "99%"), ("--quality", "'99%'", "a number")),
        (("tune", "--agreement", "99"), ("--agreement 99", "below 1")),
        (("tune", "--minutes", "soon"), ("--minutes", "'soon'", "a number")),
        (("tune", "--task", "absent.jsonl", "--quality", "0.9"), ("'absent.jsonl' cannot be read", "No such file")),
        (("tune", "--policy", "auto"), ("unknown policy 'auto'", "recipes are for decoding")),
        (("calibrate", "layers", "--policy", "tidal:reselect=9"), ("'tidal:reselect=9'", "leave them out")),
        (("tune", "--task", "kv", "--quality", "0.9"), ("'kv'", "a file of questions, FILE.jsonl")),
        (("generat",), ("'generat'", "Did you mean 'generate'?")),
        (("bench", "serv"), ("'serv'", "'serve'")),
        (("bench", "decode", "--steps", "few"), ("--steps", "'few'", "whole numbers from 2")),
        (("calibrate", "heads", "--lengths", "300,200"), ("--lengths '300,200'", "1024,10240")),
        (("bench", "decode", "--shape", "llama"), ("'llama'", "llama-3.1-8b")),
        (("bench", "decode", "--policy", "tidl"), ("'tidl'", "did you mean tidal?")),
    ],
    ids=lambda part: " ".join(part)[:40],
)
def test_mistakes_of_single_commands(
    fails: Fails, model_folder: Path, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    model = ("--model", model_folder) if arguments[0] in ("generate", "tune") else ()
    folder = ("--output-dir", tmp_path) if arguments[0] == "tune" else ()
    line = fails(*arguments, *model, *folder)
    assert all(word in line for word in words), line


bench = import_module("saccade.cli.bench")  # whose name in the package is the command's


def test_timing_vllm_without_vllm(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    line = fails("bench", "serve")
    assert "vLLM is not installed" in line and '".[vllm]"' in line


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "has no row"),
        ("context,question,answer\n", "line 1 is not JSON"),
        ('{"context": "a", "question": "b"}\n', "exactly the keys context, question, answer"),
        ("[1]\n", "not an object"),
    ],
)
def test_a_bad_task_file(fails: Fails, model_folder: Path, tmp_path: Path, lines: str, words: str) -> None:
    task = tmp_path / "own.jsonl"
    task.write_text(lines)
    line = fails("tune", "--model", model_folder, "--task", task, "--quality", 0.9, "--output-dir", tmp_path / "out")
    assert str(task) in line and words in line


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
    result = invoke(*fixed, "--context", 900)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
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
FORGOTTEN = "rectification takes tokens back, and layers of type linear_attention have forgotten"


@pytest.mark.parametrize("command", ["generate", "compare", "tune", "calibrate layers"])
@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        (LATENT, (), ("DeepseekV2ForCausalLM", "kv_lora_rank=16: multi-head latent attention")),
        (WINDOWS, (), ("none of its layers has full attention: sliding_attention; if you never exceed the window",)),
        (HYBRID, ("--policy", "tidal:dense_layers=0,rectify=4"), (FORGOTTEN, "use rectify=none")),
    ],
    ids=["latent", "windows", "recurrent"],
)
def test_a_type_of_model_that_is_refused(
    fails: Fails, tmp_path: Path, command: str, config: Any, more: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = fails(*COMMANDS[command], "--model", refused_model(tmp_path / "model", config()), *more)
    assert all(word in line for word in words), line


def test_recurrent_layers_are_not_rectified_while_timed(fails: Fails, tmp_path: Path) -> None:
    folder = refused_model(tmp_path / "model", HYBRID())
    timed = ("bench", "decode", "--shape", folder, "--context", "0", "--device", "cpu", "--policy", "quest:rectify=4")
    assert "layers of type linear_attention have forgotten" in fails(*timed)


SMALLEST: Sequence[tuple[str, ...]] = (
    *(COMMANDS[name] for name in ("generate", "compare", "tune", "calibrate layers")),
    ("bench", "decode", "--shape", "smollm2-135m", "--context", "0,4096", "--batch", "1,4", "--device", "cpu"),
)


@pytest.mark.parametrize("arguments", SMALLEST, ids=lambda arguments: " ".join(arguments[:2]))
@pytest.mark.parametrize("beside", [0, 2**16], ids=["no room", "some"])
def test_too_little_memory_is_known_before(
    fails: Fails,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    beside: int,
) -> None:
    """One byte less than the weights take, or room for few tokens beside them."""
    weights = sum(weight.numel() for weight in ModelSource.locate(str(model_folder)).skeleton().parameters()) * 4
    weights = 134_515_008 * 2 if arguments[0] == "bench" else weights
    monkeypatch.setattr(subject, "free_memory", lambda _: weights - 1 + beside)
    model = () if arguments[0] == "bench" else ("--model", model_folder, "--dtype", "float32")
    long = ("--max-new-tokens", "1000") if arguments[0] == "generate" else ()
    line = fails(*arguments, *model, *long)
    assert "GiB on cpu" in line and "GiB are free" in line
    # A token takes 5 layers of 2 KV heads of 8 numbers, of keys and of values; 30 of 3 of 64 in each of 4 rows.
    room = (beside - 1) // (5 * 2 * 8 * 2 * 4 if arguments[0] != "bench" else 30 * 3 * 64 * 2 * 2 * 4)
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
    result = invoke(*GENERATE, "--model", model_folder)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("saccade: error: memory ran out; take a smaller context, batch or dtype")
    assert "Error code" not in line


# --- what is done instead of refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [("--dtype", "fp16"), ("--dtype", "bf16"), ("--budget", "1000000"), ("--policy", " tidal : reselect = 3 ")],
    ids=" ".join,
)
def test_what_is_plain_enough_is_done(invoke: Invoke, model_folder: Path, given: tuple[str, ...]) -> None:
    result = invoke(*GENERATE, "--model", model_folder, "--max-new-tokens", 4, *given)
    assert result.exit_code == 0, result.output


def test_a_model_without_a_chat_template_is_given_the_prompt_as_it_is(invoke: Invoke, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    edited(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert invoke(*GENERATE, "--model", folder, "--max-new-tokens", 4).exit_code == 0


def test_a_group_without_a_command_shows_its_help(invoke: Invoke) -> None:
    for group in ("bench", "calibrate"):
        result = invoke(group)
        assert result.exit_code == 0
        assert "Commands" in result.stdout
        assert result.stderr == ""
