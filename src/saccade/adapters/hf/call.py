"""One forward call: which of its positions are prompt and which decode, as far as its caller has said."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

Purpose = Literal["plain", "dense", "draft", "check"]
"""Of the calls at hand. All but "plain" are verification's: one that is dense whatever it feeds, one that drafts, and
the dense pass over drafts."""


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call: `prompt` of its `queries` positions are dense, the others decode; `past` slots are filled.

    `again`: it is a dense pass over decoded tokens, few queries on a long cache.
    """

    past: int
    queries: int
    prompt: int
    again: bool = False


@dataclass(slots=True, eq=False)
class Ending:
    """Of a text that `generate` makes: ids that end a row, slots fed at most, and rows at their end, bool `[B]`."""

    tokens: Tensor | None
    last: int | None
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of whoever calls the model, and so of its calls.

    Attributes:
        prompt: positions before the first token that `generate` makes; None outside of it.
        decoding: every position decodes, also when several come at once, and what `generate` still has to read.
        starts: one token for each row decodes whose lengths only the device knows; int32 `[B]`, first real slots.
        purpose: what verification calls the model for.
        ending: of the text that `generate` makes under verification; None outside of it.
    """

    prompt: int | None = None
    decoding: bool = False
    starts: Tensor | None = None
    purpose: Purpose = "plain"
    ending: Ending | None = None

    @property
    def decodes(self) -> bool:
        """Whether the caller has said that some positions decode."""
        return self.prompt is not None or self.decoding

    def call(self, past: int, queries: int) -> Call:
        """What a call of `queries` positions behind `past` slots is."""
        if self.purpose in ("dense", "check"):
            return Call(past, queries, queries, again=self.purpose == "check")
        if self.prompt is not None and not self.decoding:
            return Call(past, queries, min(max(self.prompt - past, 0), queries))
        # A hand-written call: one token behind others is taken for a decoded one.
        decodes = self.decoding or (past > 0 and queries == 1)
        return Call(past, queries, 0 if decodes else queries)


class Callers:
    """Whoever calls one model: each thread and each task knows its own, and `asyncio.to_thread` takes it along."""

    def __init__(self) -> None:
        self._known: ContextVar[Caller] = ContextVar("caller")

    def __reduce__(self) -> tuple[type[Callers], tuple[()]]:
        return Callers, ()  # of a copied model

    @property
    def here(self) -> Caller:
        """The one whose call is at hand."""
        return self._known.get(None) or Caller()

    @contextmanager
    def knowing(self, **facts: Any) -> Iterator[None]:
        """Inside, these attributes of `here` hold."""
        before = self._known.set(replace(self.here, **facts))
        try:
            yield
        finally:
            self._known.reset(before)

    def counting_prompt(
        self, generate: Callable[..., Any], check: Callable[[dict[str, Any]], None]
    ) -> Callable[..., Any]:
        """`generate` that tells how long the prompt is, its input, behind a `check` of what it is told."""

        @functools.wraps(generate)
        def wrapper(inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            with self.knowing(prompt=_prompt_length(inputs, kwargs)):
                return generate(inputs, *args, **kwargs)

        return wrapper


def _prompt_length(inputs: Any, kwargs: dict[str, Any]) -> int:
    """Positions before the first generated token; when only a new turn is passed, its mask still covers all of them."""
    given = [inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        given.append(mask)
    return max((int(tensor.shape[1]) for tensor in given if tensor is not None), default=1)
