"""A vLLM scheduler that lets dense passes rewrite what sparse steps have decoded (ReSA, section 2.2).

With P the prompt's length and f = `rectify.every`: after f sparse steps the next step runs those f tokens and its own
new one densely, in one chunk; then counting restarts. All it takes is to set `num_computed_tokens` back.

A worker tells sparse from dense by what it sees of a step: one token behind the prompt is sparse (unless the request
opted out), anything else is dense. This file counts by the same rule.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from ....errors import ServingError
from ....plans.rectify import Clean
from .. import clean, metrics
from ..cache_spec import SaccadeAttentionSpec
from ..checks import SCHEDULER, reasons_against_rectifying
from ..options import KEY, ServeOptions, opted_out
from .held import HeldTokens
from .windows import holding


class RectifyingScheduler(Scheduler):
    """vLLM's scheduler with dense passes; without rectification in the policy it is that scheduler.

    Made for an engine that schedules asynchronously, it is an `AheadScheduler`.

    Attributes:
        rectifications: dense passes so far.
        rectified_tokens: decoded tokens that they ran again.
        preemptions: requests that lost their slots and were computed anew, densely; their later tokens may differ.

    Raises:
        ServingError: settings under which a pass cannot run, with every reason.
    """

    rectifies = schedules_ahead = True

    def __init_subclass__(cls) -> None:
        # Of a subclass no other is made than itself.
        cls.schedules_ahead = issubclass(cls, AsyncScheduler)

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        ahead = cls is RectifyingScheduler and vllm_config.scheduler_config.async_scheduling
        return super().__new__(AheadScheduler if ahead else cls)

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        options = ServeOptions.of(vllm_config)
        if options is None:
            raise ServingError(f"--scheduler-cls {SCHEDULER} needs a policy in --additional-config, under {KEY!r}")
        rectify = options.policy.rectify
        reasons = reasons_against_rectifying(vllm_config, rectify) if rectify is not None else []
        if reasons:
            raise ServingError(f"policy {options.policy} cannot be served: {'; '.join(reasons)}")
        self._together = options.rectify_together
        self._phase, self._beside = options.policy.phase, len(kv_cache_config.kv_cache_groups) > 1
        self._covered = 0
        if rectify is not None:
            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            # The longest row whose decoding steps are exact, as the workers computed it.
            covered = [spec.covered for spec in specs if isinstance(spec, SaccadeAttentionSpec)]
            if not covered:
                told = "needs --attention-backend CUSTOM: nothing else decodes sparsely"
                raise ServingError(f"--scheduler-cls {SCHEDULER} {told}")
            self._covered = min(covered)
            if self._beside:
                kv_cache_config = holding(kv_cache_config, vllm_config, rectify.every)
        self._held: dict[str, int] = {}
        self._rewound: dict[str, int] = {}
        self.rectifications = self.rectified_tokens = self.preemptions = 0
        if rectify is not None:
            for name in ("rectifications", "rectified_tokens", "preemptions"):
                self._count(name, 0)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)

    def add_request(self, request: Request) -> None:
        """One more request. Beside windows nobody may find what it decodes, for vLLM publishes those before a pass."""
        if self._beside and self._phase.every is not None and not opted_out(request.sampling_params):
            block = self.kv_cache_manager.block_pool.hash_block_size
            clean.keep_private(request, request.num_prompt_tokens, block)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One step of vLLM's scheduler, in which those whose turn it is run their unclean tokens again."""
        if self._phase.every is None:
            return super().schedule(*args, **kwargs)
        passes = self._start_passes()
        # Passes first, so that no prompt's chunk in front of them takes the tokens they were promised.
        rank = {request.request_id: index for index, request in enumerate(self.running)}
        self.running.sort(key=lambda request: request.request_id not in passes)
        output = super().schedule(*args, **kwargs)
        self.running.sort(key=lambda request: rank.get(request.request_id, len(rank)))
        self._finish_passes(passes, output)
        return output

    def _start_passes(self) -> set[str]:
        """Set back those that run their unclean tokens in this step; ids of those whose turn in the phase it is.

        A pass is never cut in two: who does not fit into this step's tokens waits, and comes first in the next. One
        token is left to each request that merely decodes, unless a pass has waited as long as a whole phase. With
        `rectify_together` those that merely decode join the first whose turn it is, as far as there is room.
        """
        self._rewound = {}
        due: list[Request] = []
        others: list[Request] = []
        decoding = 0
        for request in self.running:
            unclean = self._unclean(request)
            new = _length(request) - request.num_computed_tokens
            most = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            if request.num_output_placeholders and _length(request) >= most:
                # Its last token is on its way.
                continue
            if new == 1 and self._phase.due(unclean) and request.num_computed_tokens >= self._covered:
                due.append(request)
            elif new == 1:
                decoding += 1
                if unclean > 0 and request.num_computed_tokens >= self._covered:
                    others.append(request)
            elif unclean > 0:
                # A preempted request got one token of its recomputation, which ran sparsely: again, with the others.
                self._rewind(request)
        waited = self._held
        order = {request_id: index for index, request_id in enumerate(waited)}
        due.sort(key=lambda request: order.get(request.request_id, len(order)))
        room = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        passes, self._held = set(), {}
        for request in due:
            steps, cost = waited.get(request.request_id, 0) + 1, self._unclean(request) + 1
            if cost > room - (decoding if steps < self._phase.period else 0):
                self._held[request.request_id] = steps
                request.next_decode_eligible_step = self.current_step + 2
            else:
                room -= cost
                passes.add(request.request_id)
                self._rewind(request)
        for request in others if self._together and passes else ():
            # Its own token was kept for it; who does not fit decodes, and its turn comes as it would have come.
            more = self._unclean(request)
            if more <= room - decoding:
                room, decoding = room - more - 1, decoding - 1
                passes.add(request.request_id)
                self._rewind(request)
        return passes

    def _finish_passes(self, passes: set[str], output: SchedulerOutput) -> None:
        """Count the passes of this step, and give back the tokens of a request that vLLM did not schedule."""
        for request_id, computed in self._rewound.items():
            request = self.requests[request_id]
            if request_id not in output.num_scheduled_tokens:
                if request.status == RequestStatus.RUNNING:
                    request.num_computed_tokens = computed
            elif request_id in passes:
                self._count("rectifications", 1)
                self._count("rectified_tokens", output.num_scheduled_tokens[request_id] - 1)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Note what this step leaves clean; `num_computed_tokens` is still what it starts from."""
        if self._phase.every is not None:
            self._follow(scheduler_output)
            if self.use_v2_model_runner:
                self._resend(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _follow(self, output: SchedulerOutput) -> None:
        arrived = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            known = clean.boundary(request)
            if known is None:
                continue
            if request_id in arrived:
                # What it found in the prefix cache, or kept from the last input of its session.
                known = clean.settle(request, start)
            dense = count > 1 or opted_out(request.sampling_params)
            moved = Clean(self._phase, known).after(start, count, dense=dense).boundary
            if moved != known:
                clean.settle(request, moved)
                self.kv_cache_manager.cache_blocks(request, min(moved, request.num_tokens))

    def _resend(self, output: SchedulerOutput) -> None:
        """Send requests that were set back as new ones.

        Model runner V2 keeps the number of computed tokens on the device, and does not listen for running requests.
        A request that it knows it replaces, in the slot that it had, where all its tokens lie.
        """
        rewound = [request_id for request_id in output.scheduled_cached_reqs.req_ids if request_id in self._rewound]
        if not rewound:
            return
        output.scheduled_cached_reqs = _without(output.scheduled_cached_reqs, {*rewound})
        for request_id in rewound:
            request, blocks = self.requests[request_id], self.kv_cache_manager.get_block_ids(request_id)
            mrope = self.model_uses_mrope
            # Of M-RoPE positions are computed anew, from the tokens.
            ids: Any = [*request.all_token_ids] if mrope else HeldTokens(request.all_token_ids[0], _length(request))
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, blocks, ids, uses_mrope=mrope))

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        clean.forget(request)
        self._count("preemptions", 1)

    def _update_request_as_session(self, session: Request, update: Any) -> None:
        """The next input of a streaming session; it is dense and takes the last answer's unclean tokens with it."""
        known = clean.known_boundary(session)
        super()._update_request_as_session(session, update)
        if self._phase.every is None or known is None:
            return
        if session.num_computed_tokens > max(known, self._covered):
            session.num_computed_tokens = known

    def _unclean(self, request: Request) -> int:
        """How many of its last slots sparse steps wrote; 0 while the prompt is computed."""
        known = clean.boundary(request)
        return 0 if known is None else max(request.num_computed_tokens - known, 0)

    def _rewind(self, request: Request) -> None:
        self._rewound[request.request_id] = request.num_computed_tokens
        request.num_computed_tokens -= self._unclean(request)

    def _count(self, name: str, amount: int) -> None:
        setattr(self, name, getattr(self, name) + amount)
        metrics.count(name, amount)


class AheadScheduler(RectifyingScheduler, AsyncScheduler):
    """The same, one step ahead of the workers: the last token of a pass is on its way when the pass is scheduled.

    On model runner V2 that token lies in the request's slot before the pass reads it.
    """


def _length(request: Request) -> int:
    """Tokens of a request, with those that are on their way."""
    count: int = request.num_tokens + request.num_output_placeholders
    return count


def _without(data: CachedRequestData, gone: set[str]) -> CachedRequestData:
    """What is sent of running requests, less some of them."""
    kept = [index for index, request_id in enumerate(data.req_ids) if request_id not in gone]
    return CachedRequestData(
        req_ids=[data.req_ids[index] for index in kept],
        resumed_req_ids=data.resumed_req_ids - gone,
        new_token_ids=[data.new_token_ids[index] for index in kept] if data.new_token_ids else [],
        all_token_ids={name: ids for name, ids in data.all_token_ids.items() if name not in gone},
        new_block_ids=[data.new_block_ids[index] for index in kept],
        num_computed_tokens=[data.num_computed_tokens[index] for index in kept],
        num_output_tokens=[data.num_output_tokens[index] for index in kept],
    )
