"""Decode steps of a bfloat16 model on CPU read their weights with the native product; all else stays as it is."""

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import KernelError
from ...kernels.decode_linear.api import DecodeLinear

# Modules that PEFT puts around others, by the name under which they hold them.
_WRAPPED = ("base_layer", "original_module")


@dataclass(frozen=True, slots=True, eq=False)
class NativeForward:
    """`forward` of one module. An object, not a closure: a copy of the model must compute with its own weights."""

    module: nn.Linear
    product: DecodeLinear

    def restore(self) -> None:
        """Give the module its own forward back, unless somebody has set another meanwhile."""
        if vars(self.module).get("forward") is self:
            del self.module.__dict__["forward"]

    def __call__(self, input: Tensor) -> Tensor:
        product, parameters = self.product, self.module._parameters
        if (
            type(input) is Tensor
            and parameters.get("weight") is product.weight
            and parameters.get("bias") is product.bias
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and torch._C._get_tracing_state() is None
            and product.refusal(input) is None
        ):
            return product.run(input)
        return nn.Linear.forward(self.module, input)


def native_linears(model: nn.Module) -> list[NativeForward]:
    """Give every `nn.Linear` of a model that can take it the native product, until `restore()` of what is returned.

    Taken are modules of exactly that type with a plain contiguous bfloat16 weight on CPU, without hooks and with no
    `forward` of their own, that no adapter is wrapped around. Calls of more than 8 rows, under autocast, while a
    gradient is recorded, with other dtypes or after the weight was replaced go to the module's own forward. None is
    taken without the native library.
    """
    taken = []
    for module in _linears(model):
        with suppress(KernelError):
            taken.append(NativeForward(module, DecodeLinear(module.weight, module.bias, implementation="native")))
            module.__dict__["forward"] = taken[-1]
    return taken


def _linears(model: nn.Module) -> list[nn.Linear]:
    """The modules that compute nothing but their product, in a way that may be replaced."""
    wrappers = [module for module in model.modules() if any(name in module._modules for name in _WRAPPED)]
    wrapped = {inner for wrapper in wrappers for inner in wrapper.modules()}
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and module not in wrapped
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    ]
