"""Dense decoding attention by others, under the contract of ours: what sparse decoding is held against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..errors import SaccadeError
from ..types import KVView, Pooling, Softmax


@dataclass(frozen=True, slots=True)
class Baseline:
    """A dense decoder of others.

    Attributes:
        name: as rows call the runtime.
        dense: makes `AttentionOperations.dense` for so many cached tokens and rows; None: the stock model as it is.
        refusal: why it cannot run on a device with heads of a size, or None.
    """

    name: str
    dense: Callable[[int, int], Callable[..., tuple[Tensor, None]]] | None = None
    refusal: Callable[[torch.device, int], str | None] = lambda device, head_dim: None


def folded_sdpa(
    q: Tensor, kv: KVView, softmax: Softmax, *, pooling: Pooling | None = None, out: Tensor | None = None
) -> tuple[Tensor, None]:
    """Torch's kernel in its best form: a group's query heads as queries of one head, the cache read once.

    `enable_gqa` would read it once per query head, eight times slower on a CPU.
    """
    assert pooling is None and out is None and kv.rows.uniform, "a dense policy on rows of one length"
    keys, values = (tensor.transpose(1, 2)[:, :, : kv.rows.max_len] for tensor in (kv.k, kv.v))
    queries = q.view(q.shape[0], kv.kv_heads, -1, q.shape[2])
    return scaled_dot_product_attention(queries, keys, values, scale=softmax.scale).reshape(q.shape), None


STOCK = Baseline("transformers")
TORCH = Baseline("torch-sdpa", lambda context, batch: folded_sdpa)


def choose(
    names: Sequence[str], offered: Sequence[Baseline], refusal: Callable[[Baseline], str | None]
) -> tuple[tuple[Baseline, ...], tuple[str, ...]]:
    """The baselines asked for that can run here, all if none is named, and why others cannot."""
    known = {one.name: one for one in offered}
    asked = [name.strip() for given in names for name in given.split(",")] or [*known]
    if "none" in asked and {*asked} != {"none"}:
        raise SaccadeError(f"baseline none beside {', '.join(sorted({*asked} - {'none'}))} is not valid")
    for name in asked:
        if name not in (*known, "none"):
            valid = f"{', '.join(known)}, or none; vllm in a checkout: python -m benchmarks decode"
            raise SaccadeError(f"unknown baseline {name!r}; valid: {valid}")
    reasons = {known[name]: refusal(known[name]) for name in asked if name in known}
    left_out = tuple(f"baseline {one.name} is left out: {why}" for one, why in reasons.items() if why)
    return tuple(one for one, why in reasons.items() if not why), left_out
