"""vLLM on a CUDA device with the bundled model, fed with given tokens; and what float32 says of the same tokens."""

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from vllm import LLM, SamplingParams
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.inputs import TokensPrompt
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as BatchProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotProcessor

import saccade
from saccade.adapters.vllm.checks import SCHEDULER
from saccade.adapters.vllm.lossless import WORKER, speculation
from saccade.checkpoints.bundled import model_path
from saccade.eval.document import language_reference
from saccade.methods.policy import Policy

KEY = "given"
SHOWN = 20
"""Log-probabilities that vLLM answers with, of the likeliest tokens."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The CPU serves to rehearse."""

Given = tuple[str, list[int]]
"""A request's name, and its prompt with all that is to follow."""


class GivenTokens(BatchProcessor, SlotProcessor):  # type: ignore[misc]
    """Lets requests that name a text go on with it, and keeps the logits that they would have gone by."""

    logits: ClassVar[dict[tuple[str, int], Tensor]] = {}
    """Of the next token, by the request's name and the number of tokens before it; on the host, float32."""

    def __init__(self, *_: Any) -> None:
        self._rows: dict[int, tuple[Given | None, int, Sequence[int]]] = {}
        self._slots: dict[int, Given | None] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows[index] = (params.extra_args or {}).get(KEY), len(prompt), output
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction.name == "SWAP":
                self._rows[source] = replaced

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._slots[req_idx] = (sampling_params.extra_args or {}).get(KEY)
        return True

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        if ctx is None:
            rows = [(row, given, prompt + len(output)) for row, (given, prompt, output) in self._rows.items()]
        else:
            seen = ctx.seq_lens_upper_bound_np.tolist()
            rows = [(row, self._slots.get(slot), seen[row]) for row, slot in enumerate(ctx.idx_mapping_np.tolist())]
        for row, given, length in rows:
            if given is None:
                continue
            name, text = given
            self.logits[name, length] = logits[row].float().cpu().clone()
            if length < len(text):
                logits[row] = -torch.inf
                logits[row, text[length]] = 0
        return logits


class CudaEngines:
    """Engines of one test, one at a time."""

    def __init__(self) -> None:
        self._held: Any = None

    def make(self, policy: str | None, **settings: Any) -> LLM:
        """Stock without a policy; what a rectified one needs is added."""
        self.close()
        # A runner of version 1 that was captured before forbids every later capture in the process.
        set_cudagraph_capturing_enabled(True)
        GivenTokens.logits = {}
        ours: dict[str, Any] = {}
        if policy is not None:
            ours = {"attention_backend": "CUSTOM", "additional_config": {"saccade": {"policy": policy}}}
            rectify = Policy.from_spec(policy).rectify
            if rectify is not None and rectify.mode == "verify":
                told = speculation(str(model_path()), rectify.every, fixed="scheduler_cls" not in settings)
                ours |= {"worker_cls": WORKER, "speculative_config": told}
            elif rectify is not None:
                ours |= {"scheduler_cls": SCHEDULER, "block_size": 32}
                # As a server would: graphs hold a dense pass of all eight rows.
                ours |= {"cudagraph_capture_sizes": [1, 2, 4, *range(8, 8 * (rectify.every + 1) + 1, 8)]}
                # Model runner V1 has tokens too late for passes scheduled ahead; V2 is asked to.
                ours |= {"async_scheduling": False} if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else {}
        defaults = {
            "model": str(model_path()),
            "dtype": "float16",
            "seed": 0,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**29,
            # What must be free when an engine starts, which shares its device with those of other processes.
            "gpu_memory_utilization": 0.05,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "logits_processors": [GivenTokens],
        }
        self._held = LLM(**{**defaults, **ours, **settings})
        return self._held

    def close(self) -> None:
        if self._held is not None:
            self._held.llm_engine.engine_core.shutdown()
        self._held = None
        gc.collect()
        torch.cuda.empty_cache()


def core(engine: LLM) -> Any:
    return engine.llm_engine.engine_core.engine_core


def runner(engine: LLM) -> Any:
    return core(engine).model_executor.driver_worker.worker.model_runner


def name_of(request: Any) -> str:
    """Ours of one of the scheduler's requests, to whose name vLLM has added something."""
    name: str = request.request_id.rpartition("-")[0] or request.request_id
    return name


def scheduled(engine: LLM, name: str) -> Any:
    """The scheduler's request of a name."""
    return next(request for request in core(engine).scheduler.requests.values() if name_of(request) == name)


@cache
def text() -> list[int]:
    """Held-out text as token ids of the bundled model."""
    ids: list[int] = AutoTokenizer.from_pretrained(model_path())(language_reference(held_out=True))["input_ids"]
    return ids


@dataclass(frozen=True)
class Request:
    """A prompt and what follows it, a stretch of the held-out text.

    Attributes:
        start: of the stretch.
        prompt, new: tokens.
        sparse: false if it opts out.
    """

    name: str
    start: int
    prompt: int
    new: int
    sparse: bool = True

    @property
    def ids(self) -> list[int]:
        return text()[self.start : self.start + self.prompt + self.new]

    @property
    def lengths(self) -> range:
        """Tokens before each of those that it is answered, all but the first of which are decoded."""
        return range(self.prompt, self.prompt + self.new)

    def params(self) -> SamplingParams:
        extra: dict[str, Any] = {KEY: (self.name, self.ids), **({} if self.sparse else {"saccade": "off"})}
        return SamplingParams(
            temperature=0, max_tokens=self.new, ignore_eos=True, detokenize=False, logprobs=SHOWN, extra_args=extra
        )


def feed(engine: LLM, requests: Sequence[Request]) -> dict[str, Tensor]:
    """The logits float32 `[new, V]` of every request; the last comes while the others decode, in a step with them."""
    for number, request in enumerate(requests):
        if number and number == len(requests) - 1:
            for _ in range(3):
                engine.llm_engine.step()
        begin(engine, request)
    finish(engine)
    return {request.name: logits_of(request) for request in requests}


def begin(engine: LLM, request: Request) -> None:
    prompt = TokensPrompt(prompt_token_ids=request.ids[: request.prompt])
    engine.llm_engine.add_request(request.name, prompt, request.params())


def finish(engine: LLM) -> None:
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()


def logits_of(request: Request) -> Tensor:
    return torch.stack([GivenTokens.logits[request.name, length] for length in request.lengths])


def shown(engine: LLM, requests: Sequence[Request]) -> dict[str, list[dict[int, float]]]:
    """The largest log-probabilities of every step and request, as a server answers them."""
    prompts = [TokensPrompt(prompt_token_ids=request.ids[: request.prompt]) for request in requests]
    outputs = engine.generate(prompts, [request.params() for request in requests], use_tqdm=False)
    return {
        request.name: [{token: one.logprob for token, one in step.items()} for step in output.outputs[0].logprobs]
        for request, output in zip(requests, outputs, strict=True)
    }


@dataclass
class Truth:
    """The transformers adapter on the same device and tokens; models are loaded once.

    Attributes:
        attention: of transformers; its sdpa leaves soft-caps out.
    """

    folder: Path = field(default_factory=model_path)
    attention: str | None = None
    models: dict[torch.dtype, Any] = field(default_factory=dict)

    @torch.inference_mode()
    def logits(self, policy: str, request: Request, dtype: torch.dtype = torch.float32) -> Tensor:
        """Float32 `[new, V]`: of the prompt, dense, then token by token under the policy."""
        if dtype not in self.models:
            made = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, attn_implementation=self.attention)
            self.models[dtype] = made.to(DEVICE).eval()
        model, ids = self.models[dtype], torch.tensor([request.ids], device=DEVICE)
        cache = DynamicCache(config=model.config)
        reader = AutoTokenizer.from_pretrained(self.folder)
        with saccade.sparsify(model, policy if request.sparse else "dense", tokenizer=reader):
            pieces = [ids[:, : request.prompt], *ids[:, request.prompt : -1].split(1, dim=1)]
            logits = [model(piece, past_key_values=cache).logits[0, -1] for piece in pieces]
        return torch.stack(logits).float().cpu()


def distance(one: Tensor, other: Tensor) -> float:
    """Root of the mean squared difference of log-probabilities, which no constant added to logits changes."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).square().mean().sqrt())


def distance_shown(one: Sequence[dict[int, float]], other: Tensor) -> float:
    """As `distance`, over the tokens that are shown but the given one, which may be any."""
    chances, total, count = other.log_softmax(-1), 0.0, 0
    for step, wanted in zip(one, chances, strict=True):
        best = sorted(step, key=lambda token: -step[token])[:SHOWN]
        total += sum((step[token] - float(wanted[token])) ** 2 for token in best)
        count += len(best)
    return (total / count) ** 0.5


def say(text: str) -> None:
    """Into what pytest shows of a failed test, and of all with -s."""
    sys.stderr.write(f"{text}\n")
