"""What every forward call of an attached model goes through before its first layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...decode.counters import Counters
from ...decode.state import DecodeState, Observer
from ...errors import AttachmentError, UnsupportedModelError
from ...plans.plan import Plan
from ...plans.rectify import Clean, Phase
from ...text.history import TokenHistory
from . import cache
from .attention import EAGER, NAME, is_backward
from .call import Call, Callers, named
from .effect import require_all, require_known
from .found import Found
from .rectify import Rectifier
from .session import AtHand, Latest, Session, lasting
from .shared import SharedRows
from .support import COMPILED, NO_CACHE


@dataclass(slots=True, eq=False)
class ForwardHook:
    """Finds or installs the session of a call's cache, and tells it which positions of the call are prompt.

    Attributes:
        counters: what all sessions count into; by it a run knows its own sessions.
        levels: delimiter level of every vocabulary id, for plans that read text.
        rectifier: who makes sparse steps good; None if nobody does.
        takes: names of the decoder's arguments, in order; `kept` is that of its cache.
        own_cache: the model makes a cache of its own class, which is met when it holds a prompt.
        callers: what is known of whoever calls the model.
        verified: decoding calls are verification's, and no others.
        at_hand: knows the session of the call at hand; the attention modules hold it too.
        latest: knows that of the latest call of any thread.
        look: looks at a prompt's ids and mask for what the plan lacks; the plan from then on, None to go on looking.
    """

    plan: Plan
    counters: Counters
    observers: Sequence[Observer]
    levels: Sequence[int] | None
    rectifier: Rectifier | None
    takes: Sequence[str]
    kept: str
    own_cache: bool = False
    verified: bool = False
    callers: Callers = field(default_factory=Callers)
    at_hand: AtHand = field(default_factory=AtHand)
    latest: Latest = field(default_factory=Latest)
    look: Callable[[Tensor, Any], Plan | None] | None = None

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Prepare a call of the decoder; the inputs that it is to run on, all by name."""
        try:
            return (), self._begin(module, named(self.takes, self.kept, args, kwargs))
        except BaseException:
            # Torch calls nobody behind what a hook raises.
            self.leave()
            raise

    def _begin(self, module: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        _refuse_call(module, kwargs)
        require_known(self.kept, kwargs)
        # Layers that keep no keys leave all other positions out (transformers 5.24): right for a whole prompt alone.
        last, tokens = kwargs.pop("logits_to_keep", None), kwargs.get("input_ids")
        batch, queries = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[:2]
        held, caller = kwargs.get(self.kept), self.callers.calling()
        if caller.starts is not None:
            self._begin_fixed(held, caller.starts, batch, queries)
            return kwargs
        if isinstance(held, SharedRows):
            self._begin_shared(held)
            return kwargs
        if self.look is not None and tokens is not None and queries > 1 and self.at_hand.session is None:
            plan, look, self.look = None, self.look, None
            try:
                plan = look(tokens, kwargs.get("attention_mask"))
            finally:
                self.plan, self.look = (self.plan, look) if plan is None else (plan, None)
        if held is None:
            given = kwargs.get("use_cache")
            uses = bool(module.config.use_cache if given is None else given)
            if not uses and (caller.decoding or caller.prompt is not None):
                raise UnsupportedModelError(NO_CACHE)
            if not uses or self.own_cache:
                call = Call(0, queries, queries)
                caller.feed(call)
                self._enter(self._new_session()).begin(call)
                return kwargs
            # As the decoder would: without a configuration all layers keep everything.
            held = kwargs[self.kept] = DynamicCache(config=module.config if self.plan.roles.mixed else None)
        session = self.session_in(held)
        cache.look_over(held, session, batch)
        past = cache.filled(held, kwargs.get("cache_position"))
        call = caller.call(past, queries, session)
        if self.verified and caller.purpose == "plain" and call.prompt < queries:
            told = "rectify mode verify: the model's forward does not know of this call, so nobody would verify it"
            raise UnsupportedModelError(f"{told}; call the model itself, or attach anew if its forward was replaced")
        found = Found(held, past, session.keeping)
        self._enter(session).put_back = found.put_back
        if self.rectifier is not None or self.levels is not None:
            with lasting():
                at = kwargs.get("position_ids")
                if at is None:
                    # What a model counts for itself when nobody tells it.
                    at = torch.arange(past, past + queries, device=module.device)[None]
                session.record(past, queries, batch, tokens, at)
        if isinstance(last, int) and last == 1 and call.prompt == queries and not session.fixed:
            kwargs["logits_to_keep"] = last
        caller.feed(call, session)
        if self.rectifier is None or caller.purpose == "draft":
            session.begin(call)
            return kwargs
        kwargs = self.rectifier.begin(session, held, call, tokens, kwargs)
        if session.call.hidden:
            found.keep(session.call.past)
        return kwargs

    def after(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """What the caller gets of a call's output; None if it has raised."""
        session = self.at_hand.session
        if session is None or is_backward():
            return output
        try:
            if output is not None:
                require_all(self.plan.roles.concerned, session.answered, f"did not call the attention {NAME!r}")
                require_all(session.keeping, session.stored, "stored no keys in the cache of the call")
                if self.rectifier is not None and not session.paged:
                    output = self.rectifier.end(session, output)
                session.put_back = None
            return output
        finally:
            self.leave()

    def leave(self) -> None:
        """End the call at hand; its cache is put back if the call has not come to its end."""
        session, self.at_hand.session = self.at_hand.session, None
        if session is not None:
            session.end()

    def decoding_from(self, held: Any) -> Session | None:
        """The session of a cache that a one-token call would decode from; None if it is prompt, or another run's."""
        session = None if held is None else cache.session_of(held)
        if session is None or session.state.counters is not self.counters:
            return None
        cache.look_over(held, session)
        return session if self.callers.here.call(cache.filled(held), 1, session).prompt == 0 else None

    def _enter(self, session: Session) -> Session:
        self.at_hand.session = session
        self.latest.enter(session)
        return session

    def _begin_fixed(self, held: Any, starts: Tensor, batch: int, queries: int) -> None:
        """Prepare a call whose lengths are on the device, without a look at it."""
        cache.refuse_moving(held)
        session = self.session_in(held)
        if (self.rectifier is not None or self.plan.owns_index) and not session.promised:
            told = "runs tokens again" if self.rectifier is not None else "takes tokens in"
            raise UnsupportedModelError(
                f"the policy {told} between steps, and nobody let it: decode with GraphedStep, or call "
                "`upkeep(...).before` ahead of each step"
            )
        promised = session.promised or 1
        if queries != promised or batch != starts.shape[0]:
            raise UnsupportedModelError(
                f"this call has {batch} x {queries} tokens; {promised} for each of {starts.shape[0]} rows was promised"
            )
        self._enter(session).begin_on(*cache.advance(held, starts, again=queries - 1))

    def _begin_shared(self, held: SharedRows) -> None:
        """Prepare a step of rows that share a text, on a session of its own: nothing of it is kept."""
        with lasting():
            counters, feed = Counters(len(held.plan.roles.layers)), TokenHistory(held.levels)
            session = Session(DecodeState(held.plan, counters, history=feed), Clean(Phase(None)))
            if held.plan.reads_text:
                session.record(0, held.fed.shape[1], held.fed.shape[0], held.fed, None)
        session.paged = True
        self._enter(session).begin_on(held.rows)

    def session_in(self, held: Any) -> Session:
        """This run's session in a cache; installed there if another run's or none is."""
        known = cache.session_of(held)
        if known is None or known.state.counters is not self.counters or known.state.plan.guessed != self.plan.guessed:
            fed, known = getattr(held, cache.FED, None), self._new_session(known)
            if fed is not None:
                with lasting():
                    known.tell(fed)
            cache.install(held, known, self.plan, None if self.rectifier is None else self.rectifier.phase.every)
        return known

    def _new_session(self, earlier: Session | None = None) -> Session:
        """A session of this run; of what an earlier one knew of the cache, the feed and what is not clean go on."""
        with lasting():
            feed = earlier.state.history.continued(self.levels) if earlier is not None else TokenHistory(self.levels)
        state = DecodeState(self.plan, self.counters, self.observers, history=feed)
        final = Clean(Phase(None) if self.rectifier is None else self.rectifier.phase)
        return Session(state, final if earlier is None else final.at(earlier.final.boundary))


@dataclass(slots=True, eq=False)
class Guarded:
    """Stands in for a decoder's `forward`, `stock`: torch calls hooks behind errors, but not behind Ctrl-C."""

    stock: Any
    hook: ForwardHook
    __wrapped__ = property(attrgetter("stock"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.stock(*args, **kwargs)
        except BaseException:
            self.hook.leave()
            raise


def _refuse_call(module: Any, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        _refuse_compiled()
    if module.training:
        raise UnsupportedModelError("the model is in training mode; call model.eval()")
    held = module.config._attn_implementation
    if held not in (NAME, EAGER):
        raise AttachmentError(f"attention was set to {held!r} while attached; restore() the run before you change it")
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and getattr(module.config, "output_attentions", False)):
        raise UnsupportedModelError("output_attentions=True: sparse decoding has no matrix to return; leave it out")


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _refuse_compiled() -> None:
    """Called where the compiler meets it, and run outside: what it raises reaches the caller."""
    raise UnsupportedModelError(f"the attached model cannot be called like this: {COMPILED}")
