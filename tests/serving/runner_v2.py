"""Model runner V2 on a CPU: its Triton kernels run in Triton's interpreter. Import it before vLLM, in a process of its own.

vLLM takes V2 where Triton has a device. Here it finds a device that does nothing, since no kernel is compiled.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

assert "vllm" not in sys.modules, "vLLM has already looked for Triton"
os.environ |= {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import triton.runtime.interpreter as interpreter
from triton.backends import backends

backends.setdefault("cpu", SimpleNamespace(compiler=None, driver=None))  # type: ignore[arg-type]  # never asked


def _take_any_mask(name: str) -> None:
    """Let a builder's method take masks of integers, as compiled kernels do; the interpreter knows those of bool."""
    stock = getattr(interpreter.InterpreterBuilder, name)

    def masked(builder: Any, *given: Any) -> Any:
        return stock(builder, *(_as_mask(one) if place == MASKS[name] else one for place, one in enumerate(given)))

    setattr(interpreter.InterpreterBuilder, name, masked)


def _as_mask(mask: Any) -> Any:
    if mask.data.dtype == np.bool_:
        return mask
    return interpreter.TensorHandle(mask.data.astype(np.bool_), interpreter.tl.int1)


MASKS = {"create_masked_load": 1, "create_masked_store": 2}
"""Where a method is given its mask."""
for method in MASKS:
    _take_any_mask(method)


def schedule_ahead() -> None:
    """Let engines schedule a step before the one ahead of it is done; the CPU platform switches that off."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
