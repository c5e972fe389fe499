"""What kernels take besides pointers and strides: types and sizes of their products."""

from torch import Tensor

from saccade.kernels._triton.refusals import FLOATS

LEAST_DIM = 16
"""Sizes that a matrix product takes at least: numbers of a head, and queries."""
LEAST_TILE = 16


def widened(q: Tensor, *storage: Tensor) -> bool:
    """Whether products need float32 operands: the query's dtype does not hold every number of the cache.

    float8 numbers are exact in all of the query's dtypes.
    """
    return any(part.dtype in FLOATS and part.dtype != q.dtype for part in storage)


def item_size(q: Tensor, k: Tensor, *others: Tensor) -> int:
    """Bytes of a number that sizes a program: the cache's, or float32's where the products take that."""
    return 4 if widened(q, k, *others) else k.element_size()


def head_factors(scale: Tensor | None, kv_heads: int) -> tuple[Tensor | None, int]:
    """A factor per KV head, and its stride."""
    if scale is None:
        return None, 0
    each = scale.expand(kv_heads)
    return each, each.stride(0)


def set_steps(tensor: Tensor | None, places: int) -> tuple[int, ...]:
    """Strides of ids or counts; one set for all heads is the same for each of them."""
    if tensor is None:
        return (0,) * places
    row, one, *rest = tensor.stride()
    return row, 0 if tensor.shape[1] == 1 else one, *rest
