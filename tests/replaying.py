"""A CUDA graph's stand-in without a device: what torch's operations did is done again, with the host's numbers of then.

Whatever the host reads while a call is recorded fails, and so does everything that it would change in later calls: a
replay does not run the call's Python. Kernels of ours are called by no operation of torch's, so plain torch stands in.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from host_reads import READS
from saccade.adapters.hf import graph, probe
from saccade.kernels import _dispatch


class Operations(TorchDispatchMode):
    """Notes every operation, what it was given and what it gave; what it wrote into stands in `written` as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        assert name not in READS, f"{name} waits for the device while it is captured"
        for place, value in enumerate(args):
            alias = func._schema.arguments[place].alias_info
            if alias is not None and alias.is_write:
                self.written += [(held, held.clone()) for held in tree_leaves(value)]
        out = func(*args, **kwargs)
        self.done.append((func, args, kwargs, [one for one in tree_leaves(out) if isinstance(one, Tensor)]))
        return out


class StandIn:
    """`Recorder`, of the CPU."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def rehearse(self, call: Callable[[], Tensor]) -> Tensor:
        return call()

    def record(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with Operations() as noted, pytest.MonkeyPatch.context() as patch:
            # Where tensors lie on the host, some of our code looks into them.
            patch.setattr(Tensor, "is_cpu", False)
            output = call()
        # A capture runs nothing.
        for held, before in reversed(noted.written):
            held.copy_(before)

        def replay() -> None:
            for func, args, kwargs, outputs in noted.done:
                again = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
                for one, other in zip(outputs, again, strict=True):
                    assert one.shape == other.shape, f"{func} gives another shape than it was captured with"
                    # Views and what is written in place lie where they lay.
                    if one.data_ptr() != other.data_ptr():
                        one.copy_(other)

        return replay, output


@contextmanager
def standing_in() -> Iterator[None]:
    """Inside, graphs of steps run on the CPU, and operations choose plain torch as a capture needs it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (graph, probe):
            patch.setattr(module, "Recorder", StandIn)
        patch.setattr(_dispatch, "_unasked", lambda name: False)
        yield
