"""Fails where a computation would make the host wait for a device, watched without one.

Run it on tensors without content (torch's "meta" device): operations choose as they do on CUDA, and a read cannot
succeed. A dispatch mode watches every call that torch makes for what only a real device would show.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "_local_scalar_dense",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_dim",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "bincount",
    "argwhere",
}
"""What makes the host wait for a result or a size."""

COPIES = {"_to_copy", "copy_", "copy", "_copy_from", "_copy_from_and_resize"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
FACTORIES = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


class HostReadError(AssertionError):
    """The host would wait for the device."""


class Watched(TorchDispatchMode):
    """Fails where the host reads the device, or copies to it without going on; notes the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        _check_call(name, given, args, kwargs)
        out = _called(func, args, kwargs, given)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        _check_copy(name, given, made, kwargs)
        self.shapes.append((name, [tuple(tensor.shape) for tensor in made]))
        return out


class Factories(TorchFunctionMode):
    """Fails where the host's numbers become a tensor of the device: a copy that torch's dispatcher never sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in FACTORIES and not out.is_cpu and not isinstance(args[-1], Tensor):
            raise HostReadError("host numbers are copied to the device while the host waits")
        return out


@contextmanager
def watching() -> Iterator[Watched]:
    with Watched() as watched, Factories():
        yield watched


_results: dict[Any, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
"""Shape, strides and dtype of what a call gives, by what it is given."""


def _called(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
    """What a call gives. Without content torch works out its shape in Python: once for all calls that are alike."""
    if not given or not all(tensor.is_meta for tensor in given) or not _makes_one_tensor(func):
        return func(*args, **kwargs)
    known = func, _told(args), _told(tuple(kwargs.items()))
    if known not in _results:
        out = func(*args, **kwargs)
        _results[known] = tuple(out.shape), out.stride(), out.dtype
    shape, strides, dtype = _results[known]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@cache
def _makes_one_tensor(func: Any) -> bool:
    """Whether an operation returns a new tensor, and writes into none."""
    returned, taken = func._schema.returns, func._schema.arguments
    return [str(one.type) for one in returned] == ["Tensor"] and not any(one.alias_info for one in (*taken, *returned))


def _told(given: Any) -> Any:
    """All that a shape can depend on."""
    if isinstance(given, Tensor):
        return tuple(given.shape), given.stride(), given.dtype
    if isinstance(given, list | tuple):
        return tuple(map(_told, given))
    return type(given), given


def _check_call(name: str, given: list[Tensor], args: Any, kwargs: Any) -> None:
    on_device = [tensor for tensor in given if not tensor.is_cpu]
    if not on_device:
        return
    if name in READS:
        raise HostReadError(f"{name} waits for the device")
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        raise HostReadError("repeat_interleave without its size waits for it")
    if name in INDEXING and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        raise HostReadError(f"{name} with a mask waits for the number of its ones")
    # Single numbers travel with the call.
    if name not in COPIES and any(tensor.is_cpu and tensor.dim() for tensor in given):
        raise HostReadError(f"{name} of tensors on host and device")


def _check_copy(name: str, given: list[Tensor], made: list[Tensor], kwargs: Any) -> None:
    if name not in COPIES:
        return
    kinds = {tensor.device.type for tensor in (*given, *made)}
    if "cpu" in kinds and len(kinds) > 1:
        if made[0].is_cpu:
            raise HostReadError(f"{name} to the host")
        if not kwargs.get("non_blocking"):
            raise HostReadError(f"{name} to the device while the host waits")
