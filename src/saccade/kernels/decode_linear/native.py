"""In C: the weight is read once, in the order of memory, for all rows together."""

import torch
from torch import Tensor

from saccade.kernels._native import library as native

_FAILURES = {1: "the shapes do not fit", 2: "out of memory"}


def refusal(weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the library cannot read this weight, or None."""
    reason = native.refusal(weight)
    if reason is None and not (weight.is_contiguous() and (bias is None or bias.is_contiguous())):
        return f"the weight has strides {weight.stride()}, or the bias others than 1"
    return reason


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, inputs = weight.shape
    # It must live until the call returns, which holds its address.
    rows = x.contiguous()
    y = x.new_empty((*x.shape[:-1], outputs))
    count = rows.numel() // inputs
    if count == 0:
        return y
    failure = native.loaded().saccade_linear(
        *native.addresses(rows, weight, bias, y),
        *(count, inputs, outputs, torch.get_num_threads(), native.widest),
    )
    native.check("decode_linear", failure, _FAILURES)
    return y
