"""The two products of decoding attention on CPU, shaped for what the matrix libraries do well.

oneDNN compiles a kernel for every new shape (about 2 ms), and the context grows at every step. So it only ever sees
whole blocks; the ragged rest goes to the BLAS that serves float32 `mm`.

Their working memory is kept between calls: a step of 128K tokens needs a few megabytes for a moment in every layer.
Returned to the allocator each time, they come back as fresh pages, and faulting those in takes longer than the softmax.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

KEY_BLOCK = 16384
VALUE_BLOCK = 2048

HAS_BF16_DOT: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

# For a handful of queries against many keys oneDNN's float32 product takes 3/4 of the time of `mm` (torch 2.13).
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None

_held = threading.local()


def scratch(purpose: str, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised float32 memory, valid until the same thread asks for the same purpose again."""
    needed = math.prod(shape)
    buffer: Tensor | None = getattr(_held, purpose, None)
    if buffer is None or buffer.numel() < needed:
        # An inference tensor could not be written outside inference mode, where the next call may be.
        with torch.inference_mode(False):
            # An eighth more than asked for: the context grows by a token per step.
            buffer = torch.empty(needed + needed // 8, dtype=torch.float32, device="cpu")
        setattr(_held, purpose, buffer)
    return buffer[:needed].view(shape)


def score_keys(queries: Tensor, keys: Tensor, out: Tensor) -> None:
    """Write `queries [r, d] · keys [n, d]` to `out [r, n]`, n at most KEY_BLOCK, in float32 arithmetic."""
    count = keys.shape[0]
    if keys.dtype != torch.float32:
        keys = scratch("keys", tuple(keys.shape)).copy_(keys)
    if count == KEY_BLOCK and _onednn_linear is not None:
        out.copy_(_onednn_linear(queries, keys, None, "none", [], ""))
    else:
        torch.mm(queries, keys.t(), out=out)


def softened(scores: Tensor, scale: float) -> Tensor:
    """Softmax of `scale · scores` over the last dimension, in scratch memory."""
    scaled = torch.mul(scores, scale, out=scratch("scaled", tuple(scores.shape)))
    return torch.softmax(scaled, dim=-1, out=scratch("weights", tuple(scores.shape)))


def weigh_values(weights: Tensor, values: Tensor) -> Tensor:
    """`weights [g, n] · values [n, d]` as float32 `[g, d]`.

    A bfloat16 cache is multiplied in bfloat16 with float32 accumulation inside a block, as flash attention does; each
    weight and each block's sum is rounded once to bfloat16.
    """
    group, count = weights.shape
    whole = count - count % VALUE_BLOCK if values.dtype == torch.bfloat16 and HAS_BF16_DOT else 0
    total = weights.new_zeros(group, values.shape[1])
    if whole:
        blocks = weights[:, :whole].to(torch.bfloat16).unflatten(1, (-1, VALUE_BLOCK)).transpose(0, 1)
        total += torch.bmm(blocks, values[:whole].unflatten(0, (-1, VALUE_BLOCK))).float().sum(0)
    for start in range(whole, count, KEY_BLOCK):
        block = slice(start, min(start + KEY_BLOCK, count))
        total.addmm_(weights[:, block], values[block].float())
    return total
