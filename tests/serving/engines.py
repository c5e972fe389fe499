"""Starting vLLM engines, feeding them, and reading what they answered."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from saccade.adapters.vllm.checks import SCHEDULER
from saccade.adapters.vllm.worker.groups import Groups
from saccade.checkpoints.bundled import model_path
from saccade.eval.document import language_reference
from saccade.methods.policy import Policy

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "block_size": 32,
    "disable_log_stats": True,
    "enable_prefix_caching": False,
}

HOLDS_8_BITS = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
eight_bits = pytest.mark.skipif(
    not HOLDS_8_BITS, reason="vLLM's CPU build refuses 8-bit caches without AVX-512 and AMX"
)


class Engines:
    """Engines of one test."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def stock(self, **settings: Any) -> LLM:
        """vLLM as it comes."""
        return self._make(settings)

    def sparse(self, policy: str, *, recall: float = 0.0, **settings: Any) -> LLM:
        """vLLM decoding under a policy; a rectified one gets the scheduler that it needs."""
        options = {"policy": policy, "recall": recall}
        if Policy.from_spec(policy).rectify is not None:
            settings = {
                "scheduler_cls": SCHEDULER,
                "async_scheduling": False,
                **settings,
            }
        return self._make({"attention_backend": "CUSTOM", "additional_config": {"saccade": options}, **settings})

    def close(self) -> None:
        for engine in self._made:
            engine.llm_engine.engine_core.shutdown()
        self._made.clear()
        gc.collect()

    def _make(self, settings: dict[str, Any]) -> LLM:
        engine = LLM(**{"model": str(model_path()), **DEFAULTS, **settings})
        self._made.append(engine)
        return engine


def force_own_path(patch: pytest.MonkeyPatch) -> None:
    """Let rows that the budget covers, which vLLM's own kernel would serve, go through our operations too."""
    patch.setattr(Groups, "covers", lambda groups, length: False)


def core(engine: LLM) -> Any:
    """The engine core, which has the scheduler."""
    return engine.llm_engine.engine_core.engine_core


def runner(engine: LLM) -> Any:
    """The model runner, which has the cache."""
    return core(engine).model_executor.driver_worker.worker.model_runner


@cache
def tokens_of_text() -> list[int]:
    """Held-out text as token ids of the bundled model."""
    ids: list[int] = AutoTokenizer.from_pretrained(model_path())(language_reference().evaluation)["input_ids"]
    return ids


def prompts(*lengths: int, start: int = 0) -> list[list[int]]:
    """Prompts of these lengths, each from another place of the text."""
    text = tokens_of_text()
    return [text[start + 977 * number :][:length] for number, length in enumerate(lengths)]


@dataclass(frozen=True)
class Answer:
    """What one request was answered: token ids and the log-probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str | None


def greedy(count: int, **settings: Any) -> SamplingParams:
    """The likeliest `count` tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, **settings)


def answers(engine: LLM, asked: Sequence[Sequence[int]], params: Any) -> list[Answer]:
    """The answers to prompts of token ids, all submitted at once."""
    outputs = engine.generate([TokensPrompt(prompt_token_ids=list(ids)) for ids in asked], params, use_tqdm=False)
    return [answer_of(output.outputs[0]) for output in outputs]


def answer_of(output: Any) -> Answer:
    """One completion."""
    chances = output.logprobs or []
    logprobs = tuple(step[token].logprob for step, token in zip(chances, output.token_ids, strict=True))
    return Answer(tuple(output.token_ids), logprobs, output.finish_reason)
