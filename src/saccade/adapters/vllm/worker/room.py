"""Memory for indexes in slots, set aside on a device while the model is made: vLLM measures what is left behind."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from ....selection.index import KeySizes, SlotIndex
from ..options import held_by
from .fed import RequestFeed
from .requests import requests_of
from .worker import serving_of

SHARE = 0.1
"""Of the device's memory, the most that is set aside: slots that are seldom all needed take it from the cache."""

_ATTRIBUTE = "_saccade_room"


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """What was set aside for one engine.

    Attributes:
        text: what requests are fed, where a policy has an index in slots; else None.
        index: that index; None where it cannot stay in one place.
        requests: how many have a slot of it.
        reason: why decoding steps cannot be captured; None if nothing here stands against it.
        told: what was set aside, in words.
    """

    text: RequestFeed | None = None
    index: SlotIndex | None = None
    requests: int = 0
    reason: str | None = None
    told: str = ""


def room_of(vllm_config: Any) -> Room:
    """What was set aside; made when the engine's first layer asks, on the device on which layers are made then."""
    held = held_by(vllm_config)
    if _ATTRIBUTE not in held:
        held[_ATTRIBUTE] = _made(vllm_config)
    room: Room = held[_ATTRIBUTE]
    return room


def text_of(vllm_config: Any) -> RequestFeed | None:
    """What requests are fed, where a policy has an index in slots."""
    serving = serving_of(vllm_config)

    def ids() -> Tensor | None:
        requests = requests_of(vllm_config)
        assert requests is not None, "vLLM makes its logits processors before any step"
        return requests.ids_on_device

    return RequestFeed(serving.levels, ids) if serving.plan.owns_index else None


def _made(vllm_config: Any) -> Room:
    plan, model, text = serving_of(vllm_config).plan, vllm_config.model_config, text_of(vllm_config)
    if text is None:
        return Room()
    if plan.moves_index:
        return Room(text)
    if model.enable_sleep_mode:
        return Room(text, reason="sleep mode may discard the memory of its index")
    heads = len(plan.roles.layers[plan.roles.concerned[0]])
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    keys, longest = KeySizes(heads, model.get_head_size(), dtype, torch.get_default_device()), model.max_model_len
    requests, bound = vllm_config.scheduler_config.max_num_seqs, SHARE * current_platform.get_device_total_memory()
    single = plan.new_slots(replace(keys, device=torch.device("meta")), 1, longest=longest, fixed=True)
    assert single is not None, "it can stay in one place"
    one = single.nbytes
    # One slot more is nobody's.
    needed, fitting = one * (requests + 1), int(bound / one) - 1
    told = f"{requests} requests of up to {longest} tokens"
    if needed > bound:
        advice = f"--max-num-seqs {fitting} would fit" if fitting > 0 else "lower --max-model-len"
        reason = (
            f"its index for {told} would take {needed / 2**30:.2f} GiB, more than {SHARE:.0%} of the device's memory"
        )
        return Room(text, reason=f"{reason}: {advice}")
    index = plan.new_slots(keys, requests + 1, longest=longest, text=text, fixed=True)
    return Room(text, index, requests, told=f", with an index for {told} in {needed / 2**30:.2f} GiB set aside")
