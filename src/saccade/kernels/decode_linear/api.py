"""The product of one weight with few rows, bound to the weight: the checks that it needs are done once."""

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._dispatch import Implementation, choose
from saccade.kernels.decode_linear import native, reference

MOST_ROWS = 8
"""Rows of x that one call takes: beyond, a matrix product that keeps parts of the weight in caches is faster."""


class DecodeLinear:
    """`x · weightᵀ + bias` for the few rows of a decode step: float32 sums, rounded to bfloat16 once.

    The weight is read where it lies, at every call: it may be written to, and it may move. What was checked here is
    checked again when it has moved. Nothing is recorded for gradients. "native" takes bfloat16 numbers below the
    smallest normal one (2^-126) for 0 where the machine has instructions that multiply bfloat16. A row's result does
    not depend on the rows beside it, nor on the number of threads.

    Args:
        weight: bfloat16 `[out, in]`, neither of them 0.
        bias: bfloat16 `[out]` on the weight's device, or None.
        implementation: "native" needs a contiguous weight and bias on CPU and the library that the install builds where
            there is a C compiler. "auto" takes it if it can run, else the reference.

    Raises:
        KernelError: shapes, dtypes or devices do not fit, or the requested implementation cannot run.
    """

    __slots__ = ("_implementation", "_inputs", "_product", "_seen", "_unfit", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, implementation: Implementation = "auto") -> None:
        self.weight = weight
        self.bias = bias
        self._implementation = implementation
        self._unfit: str | None = None
        self._seen = self._look()
        self._bind()

    def __call__(self, x: Tensor) -> Tensor:
        """The product with `x`, bfloat16 `[..., in]` of at most 8 rows; bfloat16 `[..., out]`.

        Raises:
            KernelError: x does not fit, or the weight is no longer what it was.
        """
        reason = self.refusal(x)
        if reason is not None:
            raise KernelError(f"decode_linear: {reason}")
        return self.run(x)

    def refusal(self, x: Tensor) -> str | None:
        """Why the product with this `x` cannot be taken, or None."""
        seen = self._look()
        if seen != self._seen:
            self._seen, self._unfit = seen, None
            try:
                self._bind()
            except KernelError as error:
                self._unfit = f"the weight has changed: {error}"
        if self._unfit is not None:
            return self._unfit
        if x.dtype != torch.bfloat16 or x.shape[-1:] != self._inputs:
            return f"x must be bfloat16 [..., {self._inputs[0]}], got {x.dtype} {list(x.shape)}"
        if x.numel() > MOST_ROWS * self._inputs[0]:
            return f"x has {x.numel() // self._inputs[0]} rows, more than {MOST_ROWS}"
        if x.device != self.weight.device:
            return f"x is on {x.device}, the weight on {self.weight.device}"
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return "x or the weight requires a gradient"
        return None

    def run(self, x: Tensor) -> Tensor:
        """As a call, for an `x` that `refusal` has just found nothing against."""
        return self._product(x, self.weight, self.bias)

    def _look(self) -> tuple[int, torch.dtype, int]:
        """What changes when a tensor is given other memory."""
        return self.weight.data_ptr(), self.weight.dtype, 0 if self.bias is None else self.bias.data_ptr()

    def _bind(self) -> None:
        weight, bias = self.weight, self.bias
        if weight.dim() != 2 or weight.dtype != torch.bfloat16 or weight.numel() == 0:
            raise KernelError(
                f"decode_linear: weight must be bfloat16 [out, in], got {weight.dtype} {list(weight.shape)}"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
            raise KernelError(
                f"decode_linear: bias must be bfloat16 [{weight.shape[0]}], got {bias.dtype} {list(bias.shape)}"
            )
        if bias is not None and bias.device != weight.device:
            raise KernelError(f"decode_linear: bias is on {bias.device}, the weight on {weight.device}")
        chosen = choose("decode_linear", self._implementation, native=lambda: native.refusal(weight, bias))
        self._product = native.product if chosen == "native" else reference.product
        self._inputs = weight.shape[1:]
