"""vLLM's real scheduler and cache manager with dense passes, against a worker that only remembers what it was told.

The worker writes into each slot which tokens it stands for and whether it is clean: computed densely from clean slots.
So a wrong token, a block of another request or a published sparse step shows, whatever the scheduler believes.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from saccade.adapters.vllm import clean
from saccade.adapters.vllm.cache_spec import SaccadeAttentionSpec, register_cache_spec
from saccade.adapters.vllm.checks import SCHEDULER
from saccade.checkpoints.bundled import model_path

BLOCK = 4
OFF = {"saccade": "off"}


def config(policy: str, **settings: Any) -> Any:
    given = {
        **{"model": str(model_path()), "dtype": "float32", "max_model_len": 512, "block_size": BLOCK},
        **{"max_num_seqs": 8, "max_num_batched_tokens": 64, "scheduler_cls": SCHEDULER, "async_scheduling": False},
        **{"attention_backend": "CUSTOM", "additional_config": {"saccade": {"policy": policy}}},
    }
    return EngineArgs(**{**given, **settings}).create_engine_config()


def cache(policy: str, blocks: int, covered: int) -> KVCacheConfig:
    """What the workers' cache specification makes of a model of one layer."""
    layer = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    spec = SaccadeAttentionSpec.of(layer, policy, covered=covered)
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])


@dataclass
class Known:
    """What a worker knows of a request; below `prefill`, the tokens that it was sent, a single one is dense."""

    tokens: list[int]
    computed: int
    blocks: list[int]
    prefill: int
    sparse: bool


@dataclass
class Worker:
    """Follows scheduler outputs as model runner V1 does, or, with `v2`, keeps its own count as V2 does.

    One-token steps of rows up to `covered` are exact. `steps` are `(start, tokens)` of each request, `slots`, by block
    and offset, the text up to there and whether it is clean; `found` slots that each request was given when it first
    came, `given` requests that came in this step, with slots that they have not computed.
    """

    covered: int = 0
    v2: bool = False
    known: dict[str, Known] = field(default_factory=dict)
    steps: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    slots: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    def run(self, output: Any) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids | (output.preempted_req_ids or set() if self.v2 else set()):
            self.known.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._enter(new)
        self._update(output.scheduled_cached_reqs)
        sampled = [self._step(request_id, count) for request_id, count in output.num_scheduled_tokens.items()]
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled)

    def clean(self, request_id: str) -> list[bool]:
        known = self.known[request_id]
        return [self.slots[known.blocks[place // BLOCK], place % BLOCK][1] for place in range(known.computed)]

    def _enter(self, new: Any) -> None:
        ids = new.prefill_token_ids if self.v2 else new.prompt_token_ids
        tokens, before = list(ids), self.known.get(new.req_id)
        if len(tokens) < len(ids):
            assert before is not None, "nothing is held of a request that the worker does not know"
            assert tokens == before.tokens[:1] and len(before.tokens) == len(ids), "what it holds is another text"
            tokens = before.tokens
        sparse = (new.sampling_params.extra_args or {}).get("saccade") != "off"
        known = Known(tokens, new.num_computed_tokens, list(new.block_ids[0]), len(tokens), sparse)
        self.known[new.req_id] = known
        self.given.add(new.req_id)
        self.found.setdefault(new.req_id, known.computed)

    def _update(self, cached: Any) -> None:
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request_id, computed, blocks in rows:
            known = self.known[request_id]
            if self.v2:
                assert computed == known.computed, "model runner V2 does not listen to this number"
            if request_id in cached.resumed_req_ids:
                self.given.add(request_id)
                known.blocks = []
            known.computed = computed
            known.blocks += blocks[0] if blocks is not None else []

    def _slot(self, known: Known, position: int) -> tuple[int, bool]:
        held, clean = self.slots[known.blocks[position // BLOCK], position % BLOCK]
        assert held == hash(tuple(known.tokens[: position + 1])), "a slot holds another text"
        return held, clean

    def _step(self, request_id: str, count: int) -> list[int]:
        known = self.known[request_id]
        if request_id in self.given:
            # Not before those in front of it, which may compute in this very step what it was given.
            self.given.remove(request_id)
            assert all(self._slot(known, place)[1] for place in range(known.computed)), "given what a sparse step wrote"
        start, end = known.computed, known.computed + count
        self.steps[request_id].append((start, count))
        assert end <= len(known.tokens)
        exact = count > 1 or start < known.prefill or not known.sparse or end <= self.covered
        clean = exact and all(self._slot(known, position)[1] for position in range(start))
        for position in range(start, end):
            text = hash(tuple(known.tokens[: position + 1]))
            self.slots[known.blocks[position // BLOCK], position % BLOCK] = (text, clean)
        known.computed = end
        if end < len(known.tokens):
            return []
        known.tokens.append(hash(tuple(known.tokens)) % 997 + 3)
        return [known.tokens[-1]]


class Engine:
    """A scheduler and a worker, stepped by hand; `ahead`: a step is scheduled before the last one's answer is known."""

    def __init__(
        self, policy: str, blocks: int = 400, covered: int = 0, v2: bool = False, ahead: bool = False, **settings: Any
    ) -> None:
        init_none_hash(sha256)
        register_cache_spec()
        vllm_config = config(policy, **settings)
        # The platform of a CPU switches it off.
        vllm_config.scheduler_config.async_scheduling = ahead
        self.ahead, self.under_way = ahead, deque[Any]()
        vllm_config.cache_config.num_gpu_blocks = blocks
        self.worker = Worker(covered, v2)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))
            self.scheduler: Any = vllm_config.scheduler_config.get_scheduler_cls()(
                vllm_config=vllm_config,
                kv_cache_config=cache(policy, blocks, covered),
                structured_output_manager=StructuredOutputManager(vllm_config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        assert self.scheduler.use_v2_model_runner == v2
        self.requests: dict[str, Request] = {}
        self.outputs: list[Any] = []

    def add(self, name: str, prompt: Sequence[int], tokens: int, **settings: Any) -> Request:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **settings.pop("params", {}))
        request = Request(name, list(prompt), params, None, block_hasher=self.hasher, **settings)
        self.scheduler.add_request(request)
        self.requests[name] = request
        return request

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.outputs.append(output)
        self.under_way.append((output, self.worker.run(output)))
        if len(self.under_way) > self.ahead or not output.num_scheduled_tokens:
            self.scheduler.update_from_output(*self.under_way.popleft())
        for request in self.scheduler.running:
            boundary = clean.known_boundary(request)
            states = self.worker.clean(request.request_id)
            assert all(states[:boundary]), "the boundary is drawn behind what a sparse step wrote"
        return output

    def finish(self, limit: int = 4000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                break
            self.step()
        while self.under_way:
            self.scheduler.update_from_output(*self.under_way.popleft())
        assert not self.scheduler.requests
        assert not self.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.scheduler.kv_cache_config.num_blocks - 1, "all but the null block"


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def phase(length: int, tokens: int, every: int, covered: int = 0) -> list[tuple[int, int]]:
    """`(start, tokens)` of all steps behind the prompt: the rule of the documentation, as one plain loop."""
    steps, past, counted = [], length, length
    for _ in range(tokens - 1):
        if past - counted == every and past + 1 > covered:
            steps.append((counted, every + 1))
        else:
            steps.append((past, 1))
        counted = past + 1 if past - counted == every else counted
        past += 1
    return steps


HOWS: list[dict[str, bool]] = [{}, {"v2": True}, {"v2": True, "ahead": True}]
"""Model runners, and whether steps are scheduled ahead."""

TOGETHER = {"additional_config": {"saccade": {"policy": "quest:budget=16,rectify=4", "rectify_together": True}}}


def decoding(engine: Engine, name: str, length: int) -> list[tuple[int, int]]:
    """`(start, tokens)` of the steps that ran a token behind the prompt."""
    return [(start, count) for start, count in engine.worker.steps[name] if start + count > length]


def passes(steps: list[tuple[int, int]], length: int) -> list[int]:
    """Tokens that each pass has run again; it begins where the one before has ended, whenever it comes."""
    clean = past = length
    found = []
    for start, count in steps:
        if count > 1:
            assert (start, start + count) == (clean, past + 1)
            found.append(past - clean)
            clean = past + 1
        else:
            assert start == past
        past += 1
    return found
