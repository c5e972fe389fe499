"""Decode steps of a bfloat16 model on CPU read their weights with the native product; all else stays as it is."""

import torch
from torch import Tensor, nn

from ...errors import KernelError
from ...kernels.decode_linear.api import DecodeLinear

# Modules that PEFT puts around others, by the name under which they hold them.
_WRAPPED = ("base_layer", "original_module")


class NativeLinears:
    """Gives every `nn.Linear` of a model that can take it the native product, until `restore()` or a block's end.

    Taken are modules of exactly that type with a plain contiguous bfloat16 weight on CPU, without hooks and with no
    `forward` of their own, that no adapter is wrapped around. Calls of more than 8 rows, under autocast, while a
    gradient is recorded, with other dtypes or after the weight was replaced go to the module's own forward. `count`
    modules were taken; 0 without the native library.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards: list[_Forward] = []
        for module in _linears(model):
            try:
                product = DecodeLinear(module.weight, module.bias, implementation="native")
            except KernelError:
                continue
            forward = _Forward(module, product)
            module.__dict__["forward"] = forward
            self._forwards.append(forward)
        self.count = len(self._forwards)

    def restore(self) -> None:
        """Give the modules their own forward back; does nothing the second time."""
        while self._forwards:
            forward = self._forwards.pop()
            if vars(forward.module).get("forward") is forward:
                del forward.module.__dict__["forward"]


class _Forward:
    """`forward` of one module. An object, not a closure: a copy of the model must compute with its own weights."""

    def __init__(self, module: nn.Linear, product: DecodeLinear) -> None:
        self.module = module
        self._product = product

    def __call__(self, input: Tensor) -> Tensor:
        product, parameters = self._product, self.module._parameters
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
