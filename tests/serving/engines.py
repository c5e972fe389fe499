"""Starting vLLM engines, feeding them, and reading what they answered."""

import gc
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, TypeVar, cast
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from saccade import sparsify
from saccade.adapters.vllm.checks import SCHEDULER
from saccade.adapters.vllm.lossless import WORKER, speculation
from saccade.adapters.vllm.worker.sparse import SparseRows
from saccade.checkpoints.bundled import model_path
from saccade.eval.document import language_reference
from saccade.methods.policy import Policy

# What a model can do vLLM asks a new process, for the sake of CUDA; each takes 11 s to import it.
vars(registry)["_run_in_subprocess"] = operator.call
# Each engine looks for the same kernels through all that is imported, which takes half of its start.
REBIND = "register_triton_kernel_overrides"
vars(current_platform)[REBIND] = cache(getattr(current_platform, REBIND))

DEFAULTS: dict[str, Any] = {
    **{"dtype": "float32", "enforce_eager": True, "max_model_len": 4096, "max_num_seqs": 8, "block_size": 32},
    **{"kv_cache_memory_bytes": 2**28, "disable_log_stats": True, "enable_prefix_caching": False},
}

HOLDS_8_BITS = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
WITHOUT = "vLLM's CPU build refuses 8-bit caches without AVX-512 and AMX"
eight_bits = pytest.mark.skipif(not HOLDS_8_BITS, reason=WITHOUT)
T = TypeVar("T")


class Engines:
    """The engines of this process. A test's own end with it; one that tests visit ends when another is asked for.

    Never two of them: whichever ends takes the process's groups of ranks with it.
    """

    started = 0
    """How many have started in this process; `conftest.py` holds the sum to a limit."""

    def __init__(self) -> None:
        self._made: list[LLM] = []
        self._visited: str | None = None
        self._by_stock: dict[Any, Any] = {}

    def stock(self, **settings: Any) -> LLM:
        return self._make(settings)

    def sparse(self, policy: str, *, recall: float = 0.0, **settings: Any) -> LLM:
        """vLLM decoding under a policy; a rectified one gets the scheduler, or worker, that it needs.

        Drafts are always as many, unless a scheduler is named.
        """
        options, rectify = {"policy": policy, "recall": recall}, Policy.from_spec(policy).rectify
        if rectify is not None and rectify.mode == "verify":
            speculative = speculation(str(model_path()), rectify.every, fixed="scheduler_cls" not in settings)
            settings = {"worker_cls": WORKER, "speculative_config": speculative, **settings}
        elif rectify is not None:
            settings = {"scheduler_cls": SCHEDULER, "async_scheduling": False, **settings}
        return self._make({"attention_backend": "CUSTOM", "additional_config": {"saccade": options}, **settings})

    def visit(self, policy: str, *, recall: float = 0.0, **settings: Any) -> LLM:
        """The engine that the tests of one policy share; each brings its own prompts and leaves no request behind."""
        asked = repr((policy, recall, sorted(settings.items())))
        if self._visited != asked:
            self.close()
            self.sparse(policy, recall=recall, **settings)
            self._visited = asked
        return self._made[0]

    def by_stock(self, ask: Callable[[LLM], T], **settings: Any) -> T:
        """What a stock engine that lives for this question answers; asked once in a process."""
        key = ask, repr(sorted(settings.items()))
        if key not in self._by_stock:
            self.close()
            self._by_stock[key] = ask(self.stock(**settings))
            self.close()
        return cast("T", self._by_stock[key])

    def close(self) -> None:
        made, self._made, self._visited = self._made, [], None
        with patch.object(gc, "collect"):
            for engine in made:
                engine.llm_engine.engine_core.shutdown()
        if made:
            # Whoever is still named here would outlive the collection.
            del made[:], engine
            gc.collect()

    def close_own(self) -> None:
        """End what a test has started for itself."""
        if self._visited is None:
            self.close()

    def _make(self, settings: dict[str, Any]) -> LLM:
        if self._visited is not None:
            self.close()
        # vLLM collects garbage eight times for each engine, half a second every time among all that is imported here.
        try:
            with patch.object(gc, "collect"):
                engine = LLM(**{"model": str(model_path()), **DEFAULTS, **settings})
        except BaseException:
            # Else the next engine would take over the groups of ranks of this one.
            cleanup_dist_env_and_memory()
            raise
        Engines.started += 1
        self._made.append(engine)
        return engine


def force_own_path(patch: pytest.MonkeyPatch) -> None:
    """Let rows that the budget covers, which vLLM's own kernel would serve, go through our operations too."""
    patch.setattr(SparseRows, "covers", lambda rows, length: False)


def core(engine: LLM) -> Any:
    """The engine core, which has the scheduler."""
    return engine.llm_engine.engine_core.engine_core


def runner(engine: LLM) -> Any:
    """The model runner, which has the cache."""
    return core(engine).model_executor.driver_worker.worker.model_runner


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


@cache
def tokens_of_text() -> list[int]:
    ids: list[int] = tokenizer()(language_reference(held_out=True))["input_ids"]
    return ids


def prompts(*lengths: int, start: int = 0) -> list[list[int]]:
    """Prompts of these lengths, each from another place of the text."""
    text = tokens_of_text()
    return [text[start + 977 * number :][:length] for number, length in enumerate(lengths)]


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str | None


def greedy(count: int, **settings: Any) -> SamplingParams:
    """The likeliest `count` tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, **settings)


def answers(engine: LLM, asked: Sequence[Sequence[int]], params: Any) -> list[Answer]:
    outputs = engine.generate([prompt_of(ids) for ids in asked], params, use_tqdm=False)
    return [answer_of(output.outputs[0]) for output in outputs]


def by_transformers(model: Any, policy: str | None, asked: Sequence[Sequence[int]], steps: int) -> list[Answer]:
    """What transformers answers to each prompt alone, greedily: under a policy, or as the model comes."""
    found, told = [], {"return_dict_in_generate": True, "output_logits": True}
    settings = GenerationConfig(do_sample=False, max_new_tokens=steps, eos_token_id=None, pad_token_id=0, **told)
    with sparsify(model, policy, tokenizer=tokenizer()) if policy else nullcontext(), torch.no_grad():
        for prompt in asked:
            ids = torch.tensor([prompt])
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            tokens = made.sequences[0, len(prompt) :].tolist()
            chances = torch.cat(made.logits).log_softmax(-1)[range(steps), tokens]
            found.append(Answer(tuple(tokens), tuple(chances.tolist()), "length"))
    return found


_numbers = count()


def prompt_of(ids: Sequence[int]) -> TokensPrompt:
    """A prompt that finds nothing in the prefix cache, and leaves nothing there for others."""
    return TokensPrompt(prompt_token_ids=list(ids), cache_salt=f"salt {next(_numbers)}")


def answer_of(output: Any) -> Answer:
    chances = output.logprobs or []
    logprobs = tuple(step[token].logprob for step, token in zip(chances, output.token_ids, strict=True))
    return Answer(tuple(output.token_ids), logprobs, output.finish_reason)
