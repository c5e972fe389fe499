"""Making what a worker's layers share, when the first of them asks."""

from __future__ import annotations

import logging
from typing import Any

from ....errors import ServingError
from .. import metrics
from ..checks import plan_of, refuse_unsupported
from ..options import KEY, OFF, ServeOptions
from ..vllm_api import check_interfaces
from .requests import requests_of
from .tensor_parallel import plan_of_rank
from .worker import Serving

logger = logging.getLogger("vllm.saccade")

_ATTRIBUTE = "_saccade_serving"
_PAUSE = 1.0
"""Seconds between two looks at counters on an accelerator; each waits for the step that is running there."""


def serving_of(vllm_config: Any) -> Serving:
    """What this worker's layers share; made once per configuration.

    Raises:
        ServingError: no options were given, or the engine cannot decode under the policy, with every reason.
    """
    held = vars(vllm_config)
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
    whole = plan_of(vllm_config, options)
    plan = plan_of_rank(whole, parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size, _gather)
    serving = Serving(options, plan, vllm_config, _levels(vllm_config, plan))
    if parallel.rank == 0:
        logger.info("saccade: decoding with %s", options.policy)
        for note in whole.notes:
            logger.warning(note)
        _export(vllm_config, serving)
    if serving.recall is not None and serving.metrics is None:
        # What nobody can read is not worth a pass over the keys.
        serving.recall = None
    return serving


def _export(vllm_config: Any, serving: Serving) -> None:
    """Let what the worker does appear on `/metrics`, if that is set up."""
    if not metrics.exported():
        return
    pause = 0.0 if vllm_config.device_config.device_type == "cpu" else _PAUSE
    steps = serving.metrics = metrics.StepMetrics(serving.counters, serving.recall, pause)
    policy = str(serving.options.policy)
    for name in (policy, OFF):
        metrics.metric("requests", name)
    requests = requests_of(vllm_config)
    if requests is not None:
        requests.arrived = lambda row: metrics.count("requests", 1, policy if row.sparse else OFF)
        requests.emptied = steps.flush


def _gather(scores: Any) -> Any:
    from vllm.distributed import tensor_model_parallel_all_gather

    return tensor_model_parallel_all_gather(scores.contiguous(), dim=1)


def _levels(vllm_config: Any, plan: Any) -> Any:
    """Delimiter levels of the vocabulary, where a policy reads text."""
    if plan.selector is None or not plan.selector.reads_text:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    from ....checkpoints.text import delimiter_table

    return delimiter_table(cached_tokenizer_from_config(vllm_config.model_config))
