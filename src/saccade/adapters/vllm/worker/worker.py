"""What all attention layers of one worker share, from the first layer on; made whole when that layer asks."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import vllm
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.tokenizers import cached_tokenizer_from_config

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
from .requests import SERVING, requests_of
from .tensor_parallel import plan_of_rank

logger = logging.getLogger("vllm.saccade")

_PAUSE = 1.0
"""Seconds between two looks at counters on an accelerator; each waits for the step that is running there."""


@dataclass(slots=True, eq=False)
class Attended:
    """How far the step at hand has come through a plan's layers: to the end, if `due`.

    A replayed graph calls no layer: it is held to the largest warm-up that ran whole. Whether it ran, nobody sees.
    """

    vllm_config: Any
    layers: tuple[int, ...]
    due: bool = False
    done: int = 0
    rows: int = 0
    warms: bool = False
    captured: int = 0

    def begin(self, due: bool, rows: int = 0, *, warms: bool = False) -> None:
        """Hold the step before to its end. `rows`: of one that a graph may hold; `warms` says that it is nobody's."""
        if self.done or not 0 < self.rows <= self.captured:
            self.come_to(len(self.layers))
        if self.warms and self.done:
            self.captured = max(self.captured, self.rows)
        self.due, self.done, self.rows, self.warms = due, 0, rows, warms

    def note(self, layer: int) -> None:
        """Count a layer that is about to attend, behind all before it."""
        if self.layers[self.done : self.done + 1] != (layer,):
            self.come_to(self.layers.index(layer))
            self.done = self.layers.index(layer)
        self.done += 1

    def come_to(self, place: int) -> None:
        """Raise if the step needs all layers before this one, and one has not attended."""
        missing = self.layers[self.done : place]
        if self.due and missing:
            layers = get_layers_from_vllm_config(self.vllm_config, Attention).items()
            found = {type(layer.impl).__name__ for name, layer in layers if extract_layer_index(name) in missing}
            raise ServingError(
                f"vLLM {vllm.__version__} left saccade out of layers {', '.join(map(str, missing))} in a step that "
                f"decodes under the policy (attention there: {', '.join(sorted(found))}): its answer would be dense"
            )


@dataclass(frozen=True, eq=False)
class Serving:
    """Decoding under one policy in one worker.

    Attributes:
        plan: of this rank's heads.
        covered: the longest row of which the cache is exact, as every head attends to all tokens or a dense step
            writes all of them.
        levels: how text breaks around the pieces of the vocabulary, for policies that read text.
        recall, metrics: who measures it, who reports the steps; None: nobody.
        attended: what has run in the step at hand.
        indexes: those that lie in the cache, by layer.
    """

    options: ServeOptions
    plan: Plan
    covered: int
    counters: Counters
    attended: Attended
    levels: Sequence[int] | None = None
    recall: RecallObserver | None = None
    metrics: StepMetrics | None = None
    indexes: PagedIndexes = field(default_factory=PagedIndexes)

    @property
    def filled(self) -> bool:
        """Whether bounds of a page may wait until it is full."""
        return self.plan.selector is not None and self.plan.selector.granule == self.plan.bounds_page


def serving_of(vllm_config: Any) -> Serving:
    """What this worker's layers share, made once per engine; a ServingError with every reason why it cannot decode."""
    held = held_by(vllm_config)
    if SERVING not in held:
        held[SERVING] = _start(vllm_config)
    serving: Serving = held[SERVING]
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
            name, requests = str(options.policy), requests_of(vllm_config)
            # Every request is to appear on `/metrics`, and the last steps once the batch has emptied.
            for one in (name, OFF):
                metrics.metric("requests", one)
            if requests is not None:
                requests.arrived = lambda row: metrics.count("requests", 1, name if row.sparse else OFF)
                requests.emptied = steps.flush
    # What drafts write is written again: the cache of a lossless engine is exact in rows of any length.
    covered = covered_length(None if options.drafts else plan.selector, vllm_config.model_config.max_model_len)
    attended = Attended(vllm_config, plan.roles.concerned)
    return Serving(options, plan, covered, counters, attended, _levels(vllm_config, plan), recall, steps)


def _gather(scores: Tensor) -> Tensor:
    joined: Tensor = tensor_model_parallel_all_gather(scores.contiguous(), dim=1)
    return joined


def _levels(vllm_config: Any, plan: Plan) -> Sequence[int] | None:
    """How text breaks around the pieces of the vocabulary, where a policy reads text."""
    if not plan.reads_text:
        return None
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    if tokenizer is None:
        logger.warning("saccade: the engine has no tokenizer (skip_tokenizer_init), so chunks have a fixed length")
        return None
    return delimiter_table(tokenizer, plan.codes)
