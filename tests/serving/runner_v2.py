"""Model runner V2 on a CPU: its Triton kernels run in Triton's interpreter. To be imported before vLLM.

vLLM takes V2 where Triton has a device. Here it finds a device that does nothing, since no kernel is compiled.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.runtime.interpreter as interpreter
from triton.backends import backends

sys.path.insert(0, str(Path(__file__).parents[1]))  # run in processes of their own
from interpreting import quicken

assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it when it is imported"
assert "vllm" not in sys.modules, "vLLM has already looked for Triton"
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


quicken()
# What it replaces in Triton's language for a launch stays replaced: nothing is compiled here.
interpreter._LangPatchScope.restore = lambda scope: None
MASKS = {"create_masked_load": 1, "create_masked_store": 2}
"""Where a method is given its mask."""
for method in MASKS:
    _take_any_mask(method)


@contextmanager
def drawn_again() -> Iterator[None]:
    """Let vLLM draw anew behind a draft that has not stood: the interpreter has none of libdevice's functions."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as sampler

    with patch.object(sampler, "tldevice", SimpleNamespace(log1p=lambda small: interpreter.tl.log(1 + small))):
        yield


@contextmanager
def scheduled_ahead() -> Iterator[None]:
    """Let the engines made inside schedule a step before the one ahead of it is done, which vLLM forbids on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)):
        yield
