"""Memory for indexes of text on a device, set aside while the model is made: vLLM measures what is left behind that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from ....selection.history import TokenHistory
from ....selection.selector import KeySizes, Reserved
from ..options import held_by
from .worker import serving_of

SHARE = 0.1
"""Of the device's memory, the most that is set aside: slots that are seldom all needed take it from the cache."""

_ATTRIBUTE = "_saccade_room"


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """What was set aside for one engine.

    Attributes:
        reserved: the indexes; None where a policy has none of its own, or they cannot stay in one place.
        reason: why decoding steps cannot be captured; None if nothing here stands against it.
        told: what was set aside, in words.
    """

    reserved: Reserved | None = None
    reason: str | None = None
    told: str = ""


def room_of(vllm_config: Any) -> Room:
    """What was set aside; made when the engine's first layer asks, on the device on which layers are made then."""
    held = held_by(vllm_config)
    if _ATTRIBUTE not in held:
        held[_ATTRIBUTE] = _made(vllm_config)
    room: Room = held[_ATTRIBUTE]
    return room


def _made(vllm_config: Any) -> Room:
    plan, model = serving_of(vllm_config).plan, vllm_config.model_config
    selector = plan.selector
    if selector is None or not selector.stays:
        return Room()
    if model.enable_sleep_mode:
        return Room(reason="sleep mode may discard the memory of its index")
    heads = len(plan.roles.layers[plan.roles.concerned[0]])
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    keys = KeySizes(heads, model.get_head_size(), dtype, torch.get_default_device())
    layers, longest = sorted(plan.refreshing), model.max_model_len
    requests, bound = vllm_config.scheduler_config.max_num_seqs, SHARE * current_platform.get_device_total_memory()
    single = selector.reserve(layers, replace(keys, device=torch.device("meta")), 1, longest, TokenHistory())
    assert single is not None, "it stays"
    one = single.nbytes
    # One slot more is nobody's.
    needed, fitting = one * (requests + 1), int(bound / one) - 1
    told = f"{requests} requests of up to {longest} tokens"
    if needed > bound:
        advice = f"--max-num-seqs {fitting} would fit" if fitting > 0 else "lower --max-model-len"
        return Room(
            reason=f"its index for {told} would take {needed / 2**30:.2f} GiB, more than {SHARE:.0%} of the device's "
            f"memory: {advice}"
        )
    reserved = selector.reserve(layers, keys, requests + 1, longest, TokenHistory())
    return Room(reserved, told=f", with an index for {told} in {needed / 2**30:.2f} GiB set aside")
