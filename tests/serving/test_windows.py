"""Sliding windows that no row exceeds hide nothing: such models are served, and answer what transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engines, answers, by_transformers, core, force_own_path, greedy, prompts
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, Phi3Config, Qwen2Config

from saccade.adapters.vllm.cache_spec import SaccadeAttentionSpec
from saccade.checkpoints.bundled import model_path
from walking import among

LIMIT = 256
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large weights: attention that picks few tokens, answers that depend on it.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTHS, STEPS = (200, 17, 96, 31), 16
TIDAL, QUEST = "tidal:budget=4096,reselect=2,dense_layers=1", "quest:budget=4096,dense_layers=1,rectify=5"
CASES = {
    "all layers have one": (Phi3Config(**SIZES, sliding_window=LIMIT), QUEST),
    "wider than any row": (MistralConfig(**SIZES, sliding_window=300), TIDAL),
    "no layer uses it": (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=4), TIDAL),
    "every other layer has one": (
        Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=LIMIT, sliding_window_pattern=2),
        QUEST,
    ),
}


def saved(folder: Path, config: Any) -> Path:
    """A random model with the bundled model's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model_path() / name).read_bytes())
    return folder


@pytest.mark.parametrize("case", among(CASES, [case for case in CASES if case != "no layer uses it"]))
def test_answers_are_those_of_transformers(
    case: str, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32, log-probabilities within 1e-4, as in `test_covered`; every row through our own operations."""
    config, policy = CASES[case]
    settings: dict[str, Any] = {"model": str(saved(tmp_path, config)), "max_model_len": LIMIT}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = by_transformers(model, None, prompts(*LENGTHS), STEPS)
    assert len({token for answer in expected for token in answer.tokens}) > 3, "equality of one token shows little"
    force_own_path(monkeypatch)
    engine = engines.sparse(policy, **settings)
    specs = [group.kv_cache_spec for group in core(engine).scheduler.kv_cache_config.kv_cache_groups]
    assert [type(spec) for spec in specs] == [SaccadeAttentionSpec]
    found = answers(engine, prompts(*LENGTHS), greedy(STEPS))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
