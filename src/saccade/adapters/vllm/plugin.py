"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process before it does anything else."""

from __future__ import annotations

from typing import Any

from .interfaces import check_interfaces


def register() -> None:
    """Make vLLM know our attention backend and cache specification; idempotent, and nothing else changes.

    Raises:
        ServingError: if this vLLM is not the one this was written for.
    """
    check_interfaces()
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .cache_spec import register_cache_spec

    kind = "cpu.SaccadeCPUBackend" if current_platform.is_cpu() else "cuda.SaccadeFlashBackend"
    path = f"saccade.adapters.vllm.{kind}"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    register_cache_spec()
    if current_platform.is_cpu():
        _honour_choice(type(current_platform), path)


def _honour_choice(platform: Any, path: str) -> None:
    """Let the CPU platform, which always takes its own backend, take the one that was asked for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    stock = platform.__dict__["get_attn_backend_cls"].__func__
    if getattr(stock, "_saccade", False):
        return

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, *rest: Any, **more: Any) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM and not attn_selector_config.use_mla:
            return path
        chosen: str = stock(cls, selected_backend, attn_selector_config, *rest, **more)
        return chosen

    get_attn_backend_cls._saccade = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
