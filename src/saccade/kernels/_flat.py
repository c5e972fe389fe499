"""A cache seen as flat rows of head_dim numbers: on CPU one index_select over them is 40 times faster than gather."""

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.types import KVView, Rows

_INT32_ROWS = 2**31 - 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class FlatCache(NamedTuple):
    """Keys or values as `[rows, d]`; token `s` of page `p` of head `h` is row `p·page + s·slot + h·head`.

    Attributes:
        table: the flat rows, a view of the storage.
        page, slot, head: steps of the three outer dimensions, in rows.
    """

    table: Tensor
    page: int
    slot: int
    head: int

    @property
    def index_dtype(self) -> torch.dtype:
        """int32 is half the index traffic, where every row's number fits."""
        return torch.int32 if self.table.shape[0] <= _INT32_ROWS else torch.int64


def flatten(storage: Tensor) -> FlatCache:
    """View `[pages, page, Hkv, d]` as flat rows; only after `cpu_refusal` has found nothing."""
    head_dim = storage.shape[3]
    steps = [stride // head_dim for stride in storage.stride()[:3]]
    last = sum((size - 1) * step for size, step in zip(storage.shape[:3], steps, strict=True))
    table = storage.as_strided((last + 1, head_dim), (head_dim, 1))
    return FlatCache(table, *steps)


def cpu_refusal(kv: KVView) -> str | None:
    """Why the fast CPU paths cannot read this cache, or None: they need whole rows of head_dim numbers."""
    if kv.k.device.type != "cpu":
        return f"the cache is on {kv.k.device}"
    if kv.k_scale is not None or kv.v_scale is not None:
        return "the cache is quantised"
    head_dim = kv.head_dim
    for name, storage in (("k", kv.k), ("v", kv.v)):
        if storage.dtype not in FLOATS:
            return f"{name} is {storage.dtype}"
        page, slot, head, inner = storage.stride()
        if inner != 1 or page % head_dim or slot % head_dim or head % head_dim:
            return f"{name} has strides {storage.stride()}, not multiples of head dim {head_dim} with the last 1"
    return None


def host_bounds(rows: Rows) -> tuple[tuple[int, int], ...]:
    """`(row_start, seq_len)` per row on the host; reading CPU tensors costs no synchronisation."""
    if rows.bounds is not None:
        return rows.bounds
    return tuple(zip(rows.row_start.tolist(), rows.seq_lens.tolist(), strict=True))
