"""What a decoding step moves beside keys and values: the weights it reads, and the states of recurrent layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from ..types import CHUNKED, FULL, SLIDING
from .shape import shape_of
from .versions import cache_argument

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
"""How configurations name the experts that a token takes."""


def weights_read(model: Any, rows: int = 1) -> float:
    """Weights that a decoding step of so many rows reads: all but an input embedding that is not the head as well.

    Of E experts of which a token takes k the rows read E(1 - (1 - k/E)^rows), if each chooses for itself; all of them
    where the configuration does not say k.
    """
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    count = float(sum(parameter.numel() for parameter in model.parameters()))
    if head is None or inputs.weight is not head.weight:
        # Of such an embedding a step looks up one row.
        count -= inputs.weight.numel()
    chosen = experts_chosen(model.config)
    for number, held in _experts(model):
        count -= 0 if chosen is None else held * (1 - chosen / number) ** rows
    return count


def experts_chosen(config: Any) -> int | None:
    """How many experts a token takes; None where there are none, or nothing says it."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in _CHOSEN)
    return next((number for number in found if isinstance(number, int)), None)


def expert_weights(model: Any) -> int:
    """Weights of all experts that tokens choose among."""
    return sum(held for _, held in _experts(model))


def _experts(model: Any) -> list[tuple[int, int]]:
    """Of every layer with experts to choose among: how many there are, and the weights of all of them."""
    found = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        if isinstance(module, nn.ModuleList):
            found.append((len(module), sum(weight.numel() for weight in module.parameters())))
        else:
            # One tensor for all of them, the first dimension theirs.
            found += [(weight.shape[0], weight.numel()) for weight in module.parameters() if weight.dim() > 1]
    return found


def state_bytes(config: Any, dtype: torch.dtype) -> int | None:
    """Bytes of one row's states in all layers that keep neither a row's keys nor a window of them.

    Counted by running two tokens through the model on torch's meta device, where nothing is computed.

    Args:
        config: of a decoder, or of a model that holds one.
        dtype: of its weights; transformers keeps some states in float32 whatever it is.

    Returns:
        0 of a model without such layers; None if transformers cannot run it without numbers.
    """
    text = config.get_text_config(decoder=True)
    kept = [layer for layer, kind in enumerate(shape_of(text).kinds) if kind in (FULL, SLIDING, CHUNKED)]
    if len(kept) == len(shape_of(text).kinds):
        return 0
    try:
        with torch.device("meta"), torch.inference_mode():
            model = AutoModelForCausalLM.from_config(text, dtype=dtype).eval()
            for name, module in model.named_modules():
                if name.rpartition(".")[2] == "experts":
                    # Which experts a token takes depends on numbers.
                    module.forward = lambda hidden, *_, **__: hidden
            cache = model(torch.zeros(1, 2, dtype=torch.long, device="cpu"), use_cache=True)[cache_argument(model)]
    # A model's own code can raise anything.
    except Exception:
        return None
    held = [vars(layer) for layer_number, layer in enumerate(cache.layers) if layer_number not in kept]
    held.append({name: value for name, value in vars(cache).items() if name != "layers"})
    return sum(leaf.nbytes for leaf in tree_leaves(held) if isinstance(leaf, Tensor))
