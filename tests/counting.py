"""What heads of a layer have attended to, for tests of what is counted."""

from collections.abc import Sequence

import torch

from saccade.decode.counters import Usage
from saccade.types import Rows


def used(
    layer: int,
    lengths: Sequence[int],
    counts: Sequence[Sequence[int]] | None = None,
    *,
    weight: float = 1.0,
    unit: int = 1,
    overflowed: Sequence[Sequence[bool]] | None = None,
    whole: Sequence[bool] | None = None,
    rows: Rows | None = None,
) -> Usage:
    """Rows of some lengths, whose sets hold `counts` units; None: all tokens."""
    if rows is None:
        table = torch.zeros((len(lengths), 1), dtype=torch.int32)
        flags = None if whole is None else torch.tensor(whole)
        starts = torch.zeros(len(lengths), dtype=torch.int32)
        rows = Rows(table, starts, torch.tensor(lengths, dtype=torch.int32), max(lengths), whole=flags)
    held = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    flags = None if overflowed is None else torch.tensor(overflowed)
    return Usage(layer, weight, rows, held, unit, flags)
