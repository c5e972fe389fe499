"""Captures what a call launches on a CUDA device, so that it can be launched again without its Python."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModelError


class Recorder:
    """Runs calls as they will be captured, and captures them, on one stream of a CUDA device.

    Raises an UnsupportedModelError for another device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UnsupportedModelError(f"CUDA graphs need a CUDA device; this cache is on {device}")
        self._device, self._stream = device, torch.cuda.Stream(device)

    def here(self) -> AbstractContextManager[Any]:
        """Inside, the device is the current one."""
        return torch.cuda.device(self._device)

    def rehearse(self, call: Callable[[], Tensor]) -> Tensor:
        """Run a call, behind what was launched before it and ahead of what follows; what it gives."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = call()
        current.wait_stream(self._stream)
        return output

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What runs a call again, and the tensor that it writes each time; nothing runs yet."""
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, which go on, would make a capture in torch's global mode fail.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            output = call()
        return graph.replay, output
