"""What vLLM's `EngineArgs` are given for an engine to decode as it is told."""

from typing import Any

from ...plans.rectify import Rectify
from .checks import FULL_KIND, SCHEDULER, rectifies_ahead
from .lossless import ADAPTIVE, WORKER, speculation
from .options import CAPTURED, KEY, ServeOptions


def engine_settings(options: ServeOptions, model: str, *, apart: bool = False, fixed: bool = False) -> dict[str, Any]:
    """Beside the model; of a policy that rectifies, `pass_settings` says what follows from the engine's other ones.

    `apart`: whether layers with a window are left to vLLM's own backend. `fixed`: whether there are always as many
    drafts.
    """
    given: dict[str, Any] = {"additional_config": {KEY: options.to_dict()}}
    by_kind = {"backend_per_kind": {FULL_KIND: "CUSTOM"}}
    given |= {"attention_config": by_kind} if apart else {"attention_backend": "CUSTOM"}
    if options.rewrites is not None:
        given["scheduler_cls"] = SCHEDULER
    if options.drafts:
        given |= {"worker_cls": WORKER, "speculative_config": speculation(model, options.drafts, fixed=fixed)}
        given |= {} if fixed else {"scheduler_cls": ADAPTIVE}
    return given


def pass_settings(vllm_config: Any, rectify: Rectify | None) -> dict[str, Any]:
    """What dense passes ask of an engine that is otherwise configured so; nothing where there are none.

    vLLM's own choice of what to capture ends at twice the rows; beyond it the host launches kernel by kernel. Captured
    is a pass of all rows, `every` + 1 tokens each, unless it is already, or nothing is.
    """
    if rectify is None:
        return {}
    given: dict[str, Any] = {} if rectifies_ahead(vllm_config) else {"async_scheduling": False}
    held, scheduling = vllm_config.compilation_config.cudagraph_capture_sizes, vllm_config.scheduler_config
    wanted = min(CAPTURED, (rectify.every + 1) * scheduling.max_num_seqs, scheduling.max_num_batched_tokens)
    if held and max(held) < wanted:
        # As dense as vLLM's own list.
        sizes = {*held, wanted, *range(8, min(wanted, 256), 8), *range(256, wanted, 16)}
        given["cudagraph_capture_sizes"] = sorted(sizes)
    return given
