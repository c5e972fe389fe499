"""Which implementation serves a call; an explicit request is honoured or refused, never replaced."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from saccade.errors import KernelError
from saccade.kernels._flat import cpu_refusal
from saccade.kernels._native.attention import native_refusal
from saccade.kernels._triton.refusals import attention_refusal, interpreting
from saccade.types import KVView, Selection

Implementation = Literal["auto", "reference", "cpu", "native", "triton"]


Refusal = Callable[[], str | None]
"""Why an implementation cannot run, or None."""


def choose(
    operation: str,
    implementation: Implementation,
    *,
    native: Refusal | None = None,
    cpu: Refusal | None = None,
    triton: Refusal | None = None,
) -> Implementation:
    """The implementation that runs: the requested one, or the first that does not refuse, else the reference."""
    known: tuple[tuple[Implementation, Refusal | None], ...] = (("native", native), ("cpu", cpu), ("triton", triton))
    if implementation == "auto":
        for name, refusal in known:
            if refusal is not None and _unasked(name) and refusal() is None:
                return name
        return "reference"
    refusals = {name: refusal for name, refusal in known if refusal is not None}
    if implementation == "reference":
        return implementation
    if implementation not in refusals:
        names = ["auto", "reference", *refusals]
        raise KernelError(
            f"{operation}: unknown implementation {implementation!r}; use {', '.join(names[:-1])} or {names[-1]}"
        )
    reason = refusals[implementation]()
    if reason is not None:
        raise KernelError(f"{operation}: implementation {implementation!r} cannot take this call: {reason}")
    return implementation


def choose_attention(
    operation: str, implementation: Implementation, q: Tensor, kv: KVView, selection: Selection | None = None
) -> tuple[Implementation, KVView]:
    """`choose` for an operation that attends to a cache, and the cache as the implementation reads it."""
    unheeded = None if kv.rows.whole is None else "it knows neither rows that are whole nor rows that pad a batch"
    narrow = None if kv.v.shape[-1] == kv.head_dim else f"values are {kv.v.shape[-1]} wide, keys {kv.head_dim}"
    chosen = choose(
        operation,
        implementation,
        native=lambda: narrow or unheeded or native_refusal(q, kv, selection),
        cpu=lambda: narrow or unheeded or cpu_refusal(kv),
        triton=lambda: narrow or attention_refusal(q, kv, selection),
    )
    # The C library alone knows tiles.
    return chosen, kv if chosen == "native" else kv.in_rows()


def _unasked(name: Implementation) -> bool:
    """Whether an implementation may run that nobody named: Triton's interpreter is for tests."""
    return name != "triton" or not interpreting()
