"""One forward call: which of its positions are prompt and which decode, as far as its caller has said."""

import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FrameType
from typing import Any, Literal

from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from ...checkpoints.versions import FORMER
from ...errors import AttachmentError
from .effect import Text

_CONTEXTLIB = contextmanager.__code__.co_filename


def named(takes: Sequence[str], kept: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names that its callee `takes`, in order; the cache by that of today, `kept`."""
    given = {**dict(zip(takes, args, strict=False)), **kwargs}
    if kept not in given and FORMER in given:
        given[kept] = given.pop(FORMER)
    return given


Purpose = Literal["plain", "dense", "draft", "check"]
"""Of the calls at hand. All but "plain" are verification's: one that is dense whatever it feeds, one that drafts, and
the dense pass over drafts."""


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call: `prompt` of its `queries` positions are dense, the others decode; `past` slots are filled.

    `again`: it is a dense pass over decoded tokens, few queries on a long cache. `hidden`: so many of its first tokens
    were fed before, and their slots are hidden from it. `slots`, int64 `[n]`: where its tokens go whose lengths only
    the device knows; None in every other call.
    """

    past: int
    queries: int
    prompt: int
    again: bool = False
    hidden: int = 0
    slots: Tensor | None = None


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
        text: that `generate` makes; None outside of it.
        blocks: generators with an open block, which holds while they run, and threads; None: of a function.
    """

    prompt: int | None = None
    decoding: bool = False
    starts: Tensor | None = None
    purpose: Purpose = "plain"
    ending: Ending | None = None
    text: Text | None = None
    blocks: tuple[tuple[FrameType, int] | None, ...] = ()

    def call(self, past: int, queries: int, cache: object = None) -> Call:
        """What a call of `queries` positions behind `past` slots of a cache is."""
        if self.purpose in ("dense", "check"):
            return Call(past, queries, queries, again=self.purpose == "check")
        if self.prompt is not None and not self.decoding and (self.text is None or self.text.is_on(cache)):
            return Call(past, queries, min(max(self.prompt - past, 0), queries))
        # A hand-written call, perhaps inside of `generate`: one token behind others is taken for a decoded one.
        return Call(past, queries, 0 if self.decoding or (past > 0 and queries == 1) else queries)

    def feed(self, call: Call, cache: object = None) -> None:
        """Count a call on a cache for the text that `generate` makes; drafts count once they are checked."""
        if self.text is not None and self.purpose != "draft":
            # What verification runs densely, it has found to be what the policy's promise asks for.
            asked = replace(self, purpose="plain").call(call.past, call.queries, cache)
            self.text.feed(call.queries, call.queries - asked.prompt, cache)


class Anew:
    """What belongs to one model's calls: a copied or pickled model gets a new, empty one."""

    def __reduce__(self) -> tuple[type[Any], tuple[()]]:
        return type(self), ()


class Callers(Anew):
    """Whoever calls one model: each thread and each task knows its own, and `asyncio.to_thread` takes it along."""

    def __init__(self) -> None:
        self._known: ContextVar[Caller] = ContextVar("caller")
        self._blocks: list[tuple[FrameType, int] | None] = []

    @property
    def here(self) -> Caller:
        """The one whose call is at hand."""
        known = self._known.get(None) or Caller()
        return known if {*known.blocks} - {None} <= {*self._blocks} else Caller()  # a generator ended elsewhere

    def calling(self) -> Caller:
        """As `here`; an AttachmentError if a generator was suspended in a block, or runs on in another context."""
        caller = self.here
        for block in filter(None, [*self._blocks]):
            running = block[0] in _stack()
            # Another thread that knows of it was told, as by `asyncio.to_thread`.
            if running != (block in caller.blocks) and (running or block[1] == threading.get_ident()):
                told = f"a block of this run stays open around a yield of {block[0].f_code.co_name!r}"
                raise AttachmentError(f"{told}, where it cannot hold: open it around calls of the model alone")
        return caller

    @contextmanager
    def knowing(self, **facts: Any) -> Iterator[None]:
        """Inside, these attributes of `here` hold."""
        before = self._known.set(replace(self.here, **facts))
        try:
            yield
        finally:
            # A generator may end in another context than it began in, which knows nothing.
            with suppress(ValueError):
                self._known.reset(before)

    @contextmanager
    def holding(self, **facts: Any) -> Iterator[None]:
        """As `knowing`, for a block of a caller's own, which may stand in a generator."""
        block = _generator()
        self._blocks.append(block)
        try:
            with self.knowing(blocks=(*self.here.blocks, block), **facts):
                yield
        finally:
            self._blocks.remove(block)


@dataclass(slots=True, eq=False)
class Generate:
    """Stands in for a model's `generate`, `stock`, behind a `check`: it says where prompt and text end, and counts.

    An object that holds what it needs, not a closure: a copy of the model has one of its own.
    """

    model: Any
    stock: Any
    callers: Callers
    check: Callable[[Any, Mapping[str, Any]], None]
    ending: Callable[..., Ending] | None

    def __call__(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.check(self.model, kwargs)
        prompt, unread = _prompt(inputs, kwargs)
        text, knowing = Text(unread), self.callers.knowing
        with knowing(prompt=prompt, text=text), knowing(ending=self.ending and self.ending(args, kwargs)):
            output = self.stock(inputs, *args, **kwargs)
        made, ids = getattr(output, "sequences", output), kwargs.get("input_ids") if inputs is None else inputs
        # A loop of the caller's own may leave more than its last token unfed.
        if isinstance(made, Tensor) and kwargs.get("custom_generate") is None:
            begun = 0 if kwargs.get("inputs_embeds") is not None else 1
            text.end(made.shape[1] - (begun if ids is None else ids.shape[1]))
        return output

    __wrapped__ = property(attrgetter("stock"))  # whose signature this one has


def _stack() -> list[FrameType]:
    """The frames that run in this thread, the latest first."""
    return [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]


def _generator() -> tuple[FrameType, int] | None:
    """The generator and thread that open a block, context managers of contextlib's passed over; None: a function."""
    for frame in _stack()[1:]:
        entered = frame.f_back is not None and frame.f_back.f_code.co_filename == _CONTEXTLIB
        suspends = frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)
        if frame.f_code.co_filename != _CONTEXTLIB and not (suspends and entered):
            return (frame, threading.get_ident()) if suspends else None
    return None


def _prompt(inputs: Any, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Slots before the first token that `generate` makes, and how many of them it may still have to read."""
    given = [inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    length = max((int(tensor.shape[1]) for tensor in given if tensor is not None), default=1)
    mask, caches = kwargs.get("attention_mask"), (one for one in kwargs.values() if isinstance(one, Cache))
    held = next(map(_filled, caches), 0)
    if mask is not None and mask.dim() == 2 and mask.shape[1] > length:
        # As transformers has it: then the input is what comes behind the cache.
        return int(mask.shape[1]) if held is None else held + length, length
    return length, length - held if held and held < length else length


def _filled(cache: Cache) -> int | None:
    """Slots that hold a token; None for a static cache of transformers 4, which counts keys that are not 0."""
    static = [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, StaticLayer)]
    return int(cache.get_seq_length()) if all(hasattr(layer, "cumulative_length") for layer in static) else None
