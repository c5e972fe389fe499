"""How far a request's KV is clean: no slot below the boundary was written by a sparse step and left as it was.

One number on vLLM's `Request`, in the process of the scheduler. Prompt positions are dense, so the boundary starts at
the prompt's length; dense steps that start at or below it move it.
"""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from ...selection.selector import Selector
from .options import opted_out

_ATTRIBUTE = "_saccade_clean"
_PRIVATE = "_saccade_private"


def boundary(request: Any) -> int | None:
    """Slots of `request` below it are clean once they are computed; None: all are, it has only decoded densely."""
    known = known_boundary(request)
    if known is None and not opted_out(request.sampling_params):
        # First seen before its first sparse step: whatever comes before the end of the prompt is dense.
        known = vars(request)[_ATTRIBUTE] = request.num_prompt_tokens
    return known


def known_boundary(request: Any) -> int | None:
    """What was noted so far; None also for a request that nobody has looked at."""
    known: int | None = vars(request).get(_ATTRIBUTE)
    return known


def settle(request: Any, end: int) -> int:
    """Note that slots below `end` are clean, whatever they were; the boundary that follows."""
    known = max(boundary(request) or 0, end)
    vars(request)[_ATTRIBUTE] = known
    return known


def keep_private(request: Any, end: int, block: int) -> None:
    """Let nobody find what `request` writes behind its first `end` slots, by hashes of `block` tokens that are its own.

    vLLM publishes the blocks of layers that no policy concerns as it always does: their keys and values follow from
    what sparse steps have computed, and nothing but the hash says so. It chains hashes, so those to come differ too.
    """
    held = vars(request)
    if _PRIVATE in held or request._block_hasher is None:
        return
    stock: Callable[[Any], list[bytes]] = request._block_hasher
    held[_PRIVATE] = own = uuid4().bytes

    def hasher(asking: Any) -> list[bytes]:
        first = len(asking.block_hashes) + 1
        return [
            known if number * block <= end else own + known for number, known in enumerate(stock(asking), start=first)
        ]

    request._block_hasher = hasher


def forget(request: Any) -> None:
    """Note that `request` has lost its slots: all of it will be computed anew, and densely."""
    vars(request).pop(_ATTRIBUTE, None)


def covered_length(selector: Selector | None, limit: int) -> int:
    """The longest row, of at most `limit` tokens, up to which every head attends to all tokens: KV is exact there."""
    if selector is None:
        return limit
    return next((length - 1 for length in range(1, limit + 1) if not selector.covers(length)), limit)
