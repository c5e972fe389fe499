"""In C: the weight is read once, in the order of memory, for all rows together."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._native import library as native

_FAILURES = {1: "the shapes do not fit", 2: "out of memory"}


def refusal(weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the library cannot read this weight, or None."""
    if native.library() is None:
        return "no library was built at install (a C compiler is needed)"
    if not weight.is_cpu:
        return f"the weight is on {weight.device}"
    if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        return f"the weight has strides {weight.stride()}, or the bias others than 1"
    return None


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, inputs = weight.shape
    # It must live until the call returns, which holds its address.
    rows = x.contiguous()
    y = x.new_empty((*x.shape[:-1], outputs))
    count = rows.numel() // inputs
    if count == 0:
        return y
    found = native.library()
    assert found is not None, "refusal was asked"
    failure = found.saccade_linear(
        rows.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        count,
        inputs,
        outputs,
        torch.get_num_threads(),
        native.widest,
    )
    if failure:
        raise KernelError(f"decode_linear: {_FAILURES.get(failure, failure)}")
    return y
