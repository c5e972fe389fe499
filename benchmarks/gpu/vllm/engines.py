"""The engines of random weights that smoke.py asks, stock or with saccade's plugin."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams


def engine(shape: dict[str, Any], policy: str | None, **more: Any) -> LLM:
    """An engine of that shape; under a policy it decodes with the plugin, else as vLLM does."""
    ours = {"attention_backend": "CUSTOM", "additional_config": {"saccade": {"policy": policy}}} if policy else {}
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(shape))
        return LLM(
            model=model,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            seed=0,
            enable_prefix_caching=False,
            **{**ours, **more},
        )


def prompt(length: int, vocabulary: int, numbers: random.Random) -> dict[str, list[int]]:
    """Random tokens."""
    return {"prompt_token_ids": [numbers.randrange(3, vocabulary) for _ in range(length)]}


def greedy(tokens: int, **more: Any) -> SamplingParams:
    """Exactly so many tokens, the likeliest each."""
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **more)
