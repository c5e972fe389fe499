"""How many texts are read together: a step on a GPU takes as long for many rows as for one."""

import torch

_TOKENS = 2**18
"""Of texts that a GPU reads at once."""


def rows_together(device: torch.device, count: int, length: int) -> int:
    """Of `count` texts of so many tokens: as few batches as may be, and even ones; on a CPU one after the other."""
    if device.type == "cpu":
        return 1
    batches = -(-count // max(_TOKENS // length, 1))
    return -(-count // batches)
