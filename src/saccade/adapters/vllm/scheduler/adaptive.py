"""A vLLM scheduler that drafts as many tokens as pay, none included; whatever it says, answers are the same."""

from time import perf_counter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from ....errors import ServingError
from .. import metrics
from ..checks import plan_of
from ..lossless import ADAPTIVE, lengths
from ..options import ServeOptions
from .draft_length import DraftLength


class AdaptiveScheduler(Scheduler):
    """vLLM's scheduler, which tells the workers before each step how many tokens to draft behind it.

    Made for an engine that schedules asynchronously, it is an `AheadAdaptiveScheduler`; without drafts, a ServingError.
    """

    adapts = True

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        ahead = cls is AdaptiveScheduler and vllm_config.scheduler_config.async_scheduling
        return super().__new__(AheadAdaptiveScheduler if ahead else cls)

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = ServeOptions.of(vllm_config)
        if options is None or not options.drafts:
            raise ServingError(f"--scheduler-cls {ADAPTIVE} needs a policy with rectify=8:verify")
        self.draft_length = DraftLength(lengths(options.drafts))
        self._plan = plan_of(vllm_config, options)
        self._since = perf_counter()
        super().__init__(vllm_config, *args, **kwargs)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        reached = list[int]()
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[name]
            length = request.num_computed_tokens + count
            # Whoever is still in the middle of a prompt drafts nothing.
            if length >= request.num_tokens + request.num_output_placeholders:
                reached.append(length)
        if reached:
            # Drafts that attend to everything are no cheaper than the steps that they stand for.
            covered = self._plan.covers(max(reached))
            # What vLLM has chosen by the size of the batch was to capture all lengths.
            chosen = 0 if covered else self.draft_length.next(len(reached), sum(reached))
            scheduler_output.num_spec_tokens_to_schedule = chosen
            metrics.count("cycles", 1, str(chosen))
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Note what a step says of drafts: how many stood, and what it took where it is a cycle of one length."""
        now = perf_counter()
        seconds, self._since = now - self._since, now
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for name, proposed in drafts.items():
            sampled = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]]
            self.draft_length.stood(len(proposed), max(len(sampled) - 1, 0))
        # Drafts that come between two results are those of this step or, without asynchronous scheduling, the next's.
        length, counts = scheduler_output.num_spec_tokens_to_schedule, scheduler_output.num_scheduled_tokens
        rows = [self.requests[name] for name in counts if name in self.requests]
        alike = all(count == length + 1 and len(drafts.get(name, ())) == length for name, count in counts.items())
        if rows and alike and len(rows) == len(counts):
            self.draft_length.took(length, len(rows), sum(request.num_computed_tokens for request in rows), seconds)
        return super().update_from_output(scheduler_output, model_runner_output)


class AheadAdaptiveScheduler(AdaptiveScheduler, AsyncScheduler):
    """The same, one step ahead of the workers: a length is chosen before the cycle ahead of it is over."""
