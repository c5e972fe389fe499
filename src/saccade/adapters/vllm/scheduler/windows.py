"""Windows beside rectification: vLLM frees what lies before a window, and a dense pass takes tokens back."""

from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from ....errors import ServingError


def holding(kv_cache_config: Any, vllm_config: Any, reach: int) -> Any:
    """The scheduler's view of a cache in which every window is kept as it was up to `reach` tokens ago; a ServingError
    if the longest request would then not fit, and wait for ever."""
    longest, groups, needed = vllm_config.model_config.max_model_len, list[Any](), 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            spec = replace(spec, extra_retained_tokens=spec.extra_retained_tokens + reach)
            needed += spec.max_admission_blocks_per_request(vllm_config.max_in_flight_tokens, longest)
        else:
            needed += -(-longest // spec.block_size)
        groups.append(replace(group, kv_cache_spec=spec))
    # One block stands for all that are none.
    if needed > kv_cache_config.num_blocks - 1:
        raise ServingError(
            f"a request of {longest} tokens needs {needed} blocks with the {reach} tokens that rectification takes "
            f"back, and the cache has {kv_cache_config.num_blocks - 1}: lower --max-model-len or make the cache larger"
        )
    return replace(kv_cache_config, kv_cache_groups=groups)
