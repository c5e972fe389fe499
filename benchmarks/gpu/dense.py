"""The best dense decoding attention that can be run here: what every speed-up is held against."""

import importlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .timing import Call, reason, relative_error

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q `[B, Hq, d]`, k and v `[B, Hkv, T, d]` to `[B, Hq, d]`; every token of every row is attended to."""

TOLERANCE = 2**-7
"""Relative error of a bfloat16 result: each entry is rounded by at most 2^-9 of itself, and probabilities likewise."""


def grouped(backend: SDPBackend) -> Attention:
    """Torch's kernel with fewer KV heads than query heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return attend


def folded(backend: SDPBackend) -> Attention:
    """A group's query heads as so many queries of one head, which reads each key once whatever the kernel does."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q.view(q.shape[0], k.shape[1], -1, q.shape[2]), k, v).view_as(q)

    return attend


def flash_attention_3() -> Attention:
    library = importlib.import_module("flash_attn_interface")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = library.flash_attn_with_kvcache(q[:, None], k.transpose(1, 2), v.transpose(1, 2), pack_gqa=True)
        return (out[0] if isinstance(out, tuple) else out)[:, 0]

    return attend


def flash_infer() -> Attention:
    """Its call for one row, which reads the cache where it lies; with more rows it is left out and said to be."""
    library = importlib.import_module("flashinfer")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[0] != 1:
            raise ValueError(f"FlashInfer's call for a single row cannot take {q.shape[0]}")
        return library.single_decode_with_kv_cache(q[0], k[0], v[0], kv_layout="HND", use_tensor_cores=True)[None]

    return attend


def candidates(device: torch.device) -> Iterator[tuple[str, Callable[[], Attention]]]:
    if device.type != "cuda":
        yield "torch math", lambda: grouped(SDPBackend.MATH)
        return
    yield "torch flash", lambda: grouped(SDPBackend.FLASH_ATTENTION)
    yield "torch flash, folded", lambda: folded(SDPBackend.FLASH_ATTENTION)
    yield "torch cudnn", lambda: grouped(SDPBackend.CUDNN_ATTENTION)
    yield "torch cudnn, folded", lambda: folded(SDPBackend.CUDNN_ATTENTION)
    yield "flashattention 3", flash_attention_3
    yield "flashinfer", flash_infer


def runnable(
    device: torch.device, q: Tensor, k: Tensor, v: Tensor, expected: Tensor
) -> tuple[dict[str, Attention], dict[str, str]]:
    """The candidates that give the oracle's result for these tensors, and why the others cannot be had."""
    found, missing = {}, {}
    for name, make in candidates(device):
        try:
            attention = make()
            error = relative_error(attention(q, k, v), expected)
        except Exception as failure:  # a library that is not there or does not take the call is none to compare with
            missing[name] = reason(failure)
            continue
        if error <= TOLERANCE:
            found[name] = attention
        else:
            missing[name] = f"wrong result, relative error {error:.1e}"
    return found, missing


def calls(attention: Attention, queries: list[Tensor], caches: list[tuple[Tensor, Tensor]], count: int) -> list[Call]:
    """`count` calls in turn over queries and caches."""

    def call(number: int) -> Call:
        q, (k, v) = queries[number % len(queries)], caches[number % len(caches)]
        return lambda: attention(q, k, v)

    return [call(number) for number in range(count)]
