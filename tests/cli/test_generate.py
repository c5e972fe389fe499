"""`saccade generate` streams what stock transformers would generate, and stops at bad input."""

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import Invoke

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


def test_the_prompt_may_come_from_standard_input_and_a_document(
    invoke: Invoke, model_folder: Path, tmp_path: Path
) -> None:
    document = tmp_path / "document.txt"
    document.write_text("Names refer to objects.", encoding="utf-8")
    fixed = ("--model", model_folder, "--policy", "dense", "--max-new-tokens", 8)
    joined = invoke("generate", f"Names refer to objects.\n\n{PROMPT}", *fixed).stdout
    assert invoke("generate", "--document", document, PROMPT, *fixed).stdout == joined
    assert invoke("generate", *fixed, stdin=f"Names refer to objects.\n\n{PROMPT}").stdout == joined


def test_sampling_follows_the_seed(invoke: Invoke, model_folder: Path) -> None:
    fixed = ("generate", PROMPT, "--model", model_folder, "--temperature", 1.5, "--max-new-tokens", 16)
    first, again, other = (invoke(*fixed, "--seed", seed).stdout for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_notes_go_to_standard_error(invoke: Invoke, model_folder: Path) -> None:
    result = invoke("generate", PROMPT, "--model", model_folder, "--policy", "tidal", "--max-new-tokens", 2)
    assert "note: tidal: no layer is known for this model; it decodes densely until" in result.stderr
    assert "note:" not in result.stdout
