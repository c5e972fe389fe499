"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process before it does anything else."""

import logging
from functools import cache
from typing import Any

from .checks import BACKEND, refuse_early
from .vllm_api import check_interfaces, problem

logger = logging.getLogger("vllm.saccade")


def register() -> None:
    """Make vLLM know our attention backend and cache specification; idempotent, and nothing else changes.

    In a vLLM that this was not written for it only says so: whoever does not use saccade is not to be stopped by it.
    """
    moved = problem("every process")
    if moved is not None:
        logger.warning("saccade is not available: %s", moved)
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .cache_spec import register_cache_spec

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    register_cache_spec()
    platform: Any = type(current_platform)
    _refuse_early(platform)
    if current_platform.is_cpu():
        _honour_choice(platform)


def __getattr__(name: str) -> Any:
    """`SaccadeBackend`, made when vLLM asks for it: by then a part of vLLM that has moved is named, not missed."""
    if name != BACKEND.rpartition(".")[2]:
        raise AttributeError(name)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        check_interfaces("worker", "worker on CPUs")
        from .worker.cpu import SaccadeCPUBackend

        return SaccadeCPUBackend
    check_interfaces("worker", "worker on CUDA")
    from .worker.cuda import SaccadeFlashBackend

    return SaccadeFlashBackend


@cache
def _refuse_early(platform: Any) -> None:
    """Let whoever makes a configuration hear at once what is wrong with our part of it, not two processes away."""
    stock = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        refuse_early(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


@cache
def _honour_choice(platform: Any) -> None:
    """Let the CPU platform, which always takes its own backend, take the one that was asked for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    stock = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *rest: Any, **more: Any
    ) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM and not attn_selector_config.use_mla:
            return BACKEND
        chosen: str = stock(cls, selected_backend, attn_selector_config, *rest, **more)
        return chosen

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
