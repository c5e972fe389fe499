"""Where bounds of pages are stored."""

from typing import NamedTuple

from torch import Tensor


class Stored(NamedTuple):
    """Both sides `[blocks, Hkv, P, d]` and the blocks of each row, int32 `[B, n]`; None: block b is all of row b."""

    lower: Tensor
    upper: Tensor
    table: Tensor | None
