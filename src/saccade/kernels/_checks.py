"""Argument checks shared by the operations: shapes, dtypes and devices only, never a look at tensor contents."""

import math

import torch
from torch import Tensor

from saccade.errors import KernelError
from saccade.types import KVView, Pooling, Selection, Softmax

NEIGHBOURS = 32
"""Scores of a row whose best is kept with them, where it is."""


def check_query(operation: str, q: Tensor, kv: KVView) -> None:
    """Raise KernelError unless `q [B, Hq, d]` matches the cache's rows, heads and head dim."""
    if q.dim() != 3:
        raise KernelError(f"{operation}: q must be [B, Hq, d], got {list(q.shape)}")
    (batch, heads, head_dim), keys, values = q.shape, kv.k.shape, kv.v.shape
    if len(keys) != 4 or len(values) != 4 or values[:3] != keys[:3]:
        raise KernelError(f"{operation}: k and v must be [pages, page, Hkv, d or dv], got {list(keys)}, {list(values)}")
    if head_dim != keys[3] or batch != kv.rows.batch:
        raise KernelError(
            f"{operation}: q {list(q.shape)} does not match {kv.rows.batch} rows of head dim {kv.head_dim}"
        )
    if heads % keys[2]:
        raise KernelError(f"{operation}: {heads} query heads are not a multiple of {kv.kv_heads} KV heads")
    if not q.is_floating_point():
        raise KernelError(f"{operation}: q must be floating point, got {q.dtype}")
    if q.device != kv.k.device:
        raise KernelError(f"{operation}: q is on {q.device}, the cache on {kv.k.device}")


def check_attention(operation: str, q: Tensor, kv: KVView, softmax: Softmax, out: Tensor | None = None) -> None:
    """`check_query`, and whether the softmax is of its heads and the result fits into `out`."""
    check_query(operation, q, kv)
    heads, sinks = q.shape[1], softmax.sinks
    if sinks is not None and (list(sinks.shape) != [heads] or sinks.device != q.device or not sinks.is_contiguous()):
        got = f"{list(sinks.shape)} on {sinks.device}"
        raise KernelError(f"{operation}: sinks must be contiguous [{heads}] on {q.device}, got {got}")
    if softmax.cap is not None and not 0 < softmax.cap < math.inf:
        raise KernelError(f"{operation}: cap must be more than 0 and finite, got {softmax.cap}")
    shape = [*q.shape[:2], kv.v.shape[-1]]
    if out is not None and (list(out.shape) != shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise KernelError(f"{operation}: out must be contiguous {q.dtype} {shape}, got {out.dtype} {list(out.shape)}")


def check_selection(operation: str, q: Tensor, kv: KVView, selection: Selection) -> None:
    """Raise KernelError unless the sets are those of q's rows and of one, all KV or all query heads."""
    ids, counts = selection.ids, selection.counts
    check_integers(operation, ids=ids, counts=counts)
    shape = ids.shape
    if len(shape) != 3 or shape[0] != q.shape[0] or shape[2] < 1:
        raise KernelError(f"{operation}: ids must be [B, G, M] with B {q.shape[0]}, M >= 1, got {list(shape)}")
    if shape[1] not in (1, kv.kv_heads, q.shape[1]):
        raise KernelError(
            f"{operation}: {selection.groups} sets fit neither 1, {kv.kv_heads} KV heads nor {q.shape[1]} query heads"
        )
    if counts.shape != shape[:2] or selection.unit < 1:
        raise KernelError(f"{operation}: counts {list(counts.shape)} or unit {selection.unit} do not fit the ids")


def check_pooling(operation: str, pooling: Pooling | None) -> None:
    """Raise KernelError unless the pooling is known."""
    if pooling not in ("max", "mean", "each", None):
        raise KernelError(f"{operation}: unknown pooling {pooling!r}; use max, mean or each")


def check_integers(operation: str, **tensors: Tensor) -> None:
    """Raise KernelError unless every tensor is int32."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise KernelError(f"{operation}: {name} must be int32, got {tensor.dtype}")


def placed(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in `out` if there is one."""
    return result if out is None else out.copy_(result)
