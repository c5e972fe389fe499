"""What all attention layers of one worker share, from the first layer on; made whole when that layer asks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ....checkpoints.text import delimiter_table
from ....decode.counters import Counters
from ....decode.recall import RecallObserver
from ....errors import ServingError
from ....plans.plan import Plan
from .. import metrics
from ..checks import plan_of, refuse_unsupported
from ..clean import covered_length
from ..metrics import StepMetrics
from ..options import KEY, OFF, ServeOptions, held_by
from ..vllm_api import check_interfaces
from .page_bounds import PagedIndexes
from .requests import requests_of
from .tensor_parallel import plan_of_rank

logger = logging.getLogger("vllm.saccade")

_ATTRIBUTE = "_saccade_serving"
_PAUSE = 1.0
"""Seconds between two looks at counters on an accelerator; each waits for the step that is running there."""


@dataclass(frozen=True, eq=False)
class Serving:
    """Decoding under one policy in one worker.

    Attributes:
        plan: of this rank's heads.
        covered: the longest row of which every head attends to all tokens.
        levels: delimiter levels of the vocabulary, for policies that read text.
        recall, metrics: who measures it, who reports the steps; None: nobody.
        indexes: those that lie in the cache, by layer.
    """

    options: ServeOptions
    plan: Plan
    covered: int
    counters: Counters
    levels: Sequence[int] | None = None
    recall: RecallObserver | None = None
    metrics: StepMetrics | None = None
    indexes: PagedIndexes = field(default_factory=PagedIndexes)

    @property
    def page(self) -> int | None:
        """The page of bounds that lie in the cache; None if there are none."""
        return None if self.plan.selector is None else self.plan.selector.bounds_page

    @property
    def filled(self) -> bool:
        """Whether bounds of a page may wait until it is full."""
        return self.plan.selector is not None and self.plan.selector.granule == self.page


def serving_of(vllm_config: Any) -> Serving:
    """What this worker's layers share; made once per engine.

    Raises:
        ServingError: no options were given, or the engine cannot decode under the policy, with every reason.
    """
    held = held_by(vllm_config)
    if _ATTRIBUTE not in held:
        held[_ATTRIBUTE] = _start(vllm_config)
    serving: Serving = held[_ATTRIBUTE]
    return serving


def _start(vllm_config: Any) -> Serving:
    options = ServeOptions.of(vllm_config)
    if options is None:
        raise ServingError(
            f"the attention backend CUSTOM is saccade's and needs a policy: --additional-config '{{\"{KEY}\": "
            '{"policy": "quest:budget=2048"}}\''
        )
    if options.policy.rectify is not None:
        check_interfaces("scheduler")
    refuse_unsupported(vllm_config, options)
    parallel = vllm_config.parallel_config
    whole, ranks = plan_of(vllm_config, options), parallel.tensor_parallel_size
    plan = plan_of_rank(whole, parallel.rank % ranks, ranks, _gather)
    counters, recall, steps = Counters(len(plan.roles.layers), by_row=True), None, None
    if parallel.rank == 0:
        logger.info("saccade: decoding with %s", options.policy)
        for note in whole.notes:
            logger.warning(note)
        if metrics.exported():
            # Only then is recall measured: what nobody can read is not worth a pass over the keys.
            recall = RecallObserver(plan.roles.concerned) if options.recall else None
            pause = 0.0 if vllm_config.device_config.device_type == "cpu" else _PAUSE
            steps = StepMetrics(counters, recall, pause, plan.roles.concerned)
            _count_requests(vllm_config, str(options.policy), steps)
    covered = covered_length(plan.selector, vllm_config.model_config.max_model_len)
    return Serving(options, plan, covered, counters, _levels(vllm_config, plan), recall, steps)


def _count_requests(vllm_config: Any, policy: str, steps: StepMetrics) -> None:
    """Let every request appear on `/metrics`, and the last steps once the batch has emptied."""
    for name in (policy, OFF):
        metrics.metric("requests", name)
    requests = requests_of(vllm_config)
    if requests is not None:
        requests.arrived = lambda row: metrics.count("requests", 1, policy if row.sparse else OFF)
        requests.emptied = steps.flush


def _gather(scores: Tensor) -> Tensor:
    from vllm.distributed import tensor_model_parallel_all_gather

    joined: Tensor = tensor_model_parallel_all_gather(scores.contiguous(), dim=1)
    return joined


def _levels(vllm_config: Any, plan: Plan) -> Sequence[int] | None:
    """Delimiter levels of the vocabulary, where a policy reads text."""
    if plan.selector is None or not plan.selector.reads_text:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return delimiter_table(cached_tokenizer_from_config(vllm_config.model_config))
