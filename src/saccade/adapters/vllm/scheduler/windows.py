"""Windows beside rectification: vLLM frees what lies before a window, and a dense pass takes tokens back."""

from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from ....errors import ServingError


def holding(kv_cache_config: Any, vllm_config: Any, reach: int) -> Any:
    """The scheduler's view of a cache in which every window is kept as it was up to `reach` tokens ago.

    Raises:
        ServingError: if the longest request would then not fit, and wait for ever.
    """
    groups = [_holding(group, reach) for group in kv_cache_config.kv_cache_groups]
    longest = vllm_config.model_config.max_model_len
    needed = sum(_blocks(group.kv_cache_spec, vllm_config.max_in_flight_tokens, longest) for group in groups)
    # One block stands for all that are none.
    if needed > kv_cache_config.num_blocks - 1:
        raise ServingError(
            f"a request of {longest} tokens needs {needed} blocks with the {reach} tokens that rectification takes "
            f"back, and the cache has {kv_cache_config.num_blocks - 1}: lower --max-model-len or make the cache larger"
        )
    return replace(kv_cache_config, kv_cache_groups=groups)


def _holding(group: Any, reach: int) -> Any:
    spec = group.kv_cache_spec
    if not isinstance(spec, SlidingWindowSpec):
        return group
    return replace(group, kv_cache_spec=replace(spec, extra_retained_tokens=spec.extra_retained_tokens + reach))


def _blocks(spec: Any, in_flight: int, longest: int) -> int:
    """Of one request at most."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.max_admission_blocks_per_request(in_flight, longest))
    return -(-longest // int(spec.block_size))
