"""`sparsify`: attach a policy to a loaded transformers model, and take it off again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...checkpoints.shape import shape_of_model
from ...checkpoints.text import delimiter_table
from ...decode.counters import Counters
from ...decode.recall import RecallObserver
from ...decode.state import DecodeState, Observer
from ...decode.stats import RunStats
from ...errors import AttachmentError, UnsupportedModelError
from ...methods.policy import Policy
from ...plans.plan import Plan
from ...recipes import resolve as recipes
from ...recipes.resolve import Written
from ...selection.history import UNREAD, TokenHistory
from . import attention, cache, support
from .inputs import placed, refuse_unmovable
from .ledger import Ledger
from .linear import NativeLinears
from .session import Call, Session, lasting
from .verify import Verifier

logger = logging.getLogger("saccade")

_RUN_ATTRIBUTE = "_saccade_run"
_BATCH_METHODS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


class Run:
    """A policy attached to a model; made by `sparsify`, undone by `restore()` or at the end of a `with` block."""

    def __init__(
        self,
        model: Any,
        policy: Policy,
        plan: Plan,
        *,
        tokenizer: Any,
        recall: bool,
        observers: Sequence[Observer],
        shortcut: bool,
    ) -> None:
        self.policy = policy
        self.plan = plan
        self._model = model
        self._levels: Sequence[int] | None = None
        self._notes = plan.notes
        if plan.selector is not None and plan.selector.reads_text:
            if tokenizer is None:
                self._notes += (f"{policy.name}: no tokenizer was given, so chunks have a fixed length",)
            else:
                self._levels = delimiter_table(tokenizer)
        self._keeps_history = policy.rectify is not None or self._levels is not None
        self._ledger = Ledger()
        self._verifier: Verifier | None = None
        self._recall = RecallObserver(len(plan.roles.layers)) if recall else None
        self._observers = (*observers, self._recall) if self._recall is not None else tuple(observers)
        self._shortcut = shortcut
        self._counters = Counters(len(plan.roles.layers))
        self._slot: list[Session] = []
        self._generating: int | None = None
        self._decoding = False
        self._starts: Tensor | None = None
        self._undo: list[Callable[[], None]] = []
        self._attach()

    @property
    def model(self) -> Any:
        """The model that this run is attached to."""
        return self._model

    @property
    def counters(self) -> Counters:
        """What all sequences of this run count into."""
        return self._counters

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about how the policy was bound to this model."""
        unread = any(session.state.history.has_unread for session in self._slot)
        return (*self._notes, UNREAD) if unread else self._notes

    def stats(self) -> RunStats:
        """Steps, tokens attended and, if asked for, recall per layer, over everything decoded so far.

        Index bytes and build time are those of the latest cache.
        """
        state = self._slot[0].state if self._slot else None
        return RunStats.of(
            str(self.policy),
            self._counters,
            self._recall,
            index_bytes=state.indexes.nbytes if state is not None else 0,
            build_seconds=state.indexes.build_seconds if state is not None else 0.0,
            rectification=self._ledger.read(),
        )

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside, every position of a hand-written forward call decodes sparsely, also when several come at once."""
        self._require_attached()
        before, self._decoding = self._decoding, True
        try:
            yield
        finally:
            self._decoding = before

    @contextmanager
    def lengths_on_device(self, starts: Tensor) -> Iterator[None]:
        """Inside, calls decode one token per row on a filled `StaticCache`, and the host never reads the device.

        Every call does the same to the cache's whole capacity, so that a CUDA graph can hold it; `graph.GraphedStep`
        does. Masks are not looked at.

        Args:
            starts: int32 `[B]` on the cache's device, first real slot of each row.

        Raises:
            UnsupportedModelError: if the policy needs the host between steps, with the reason.
        """
        self._require_attached()
        self._refuse_host_work()
        before, self._starts = self._starts, starts
        try:
            yield
        finally:
            self._starts = before
            for session in self._slot:
                session.slot = None

    def restore(self) -> None:
        """Give the model its stock behaviour back; does nothing the second time."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Run:
        self._require_attached()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "attached" if self._undo else "restored"
        return "\n".join((f"<saccade.Run {self.policy} on {type(self._model).__name__}, {state}>", *self.notes))

    def _refuse_host_work(self) -> None:
        """Raise for what the host does between steps, which no graph can hold."""
        selector = self.plan.selector
        if self.policy.rectify is not None:
            reason = f"rectify={self.policy.rectify} runs dense passes between steps; use rectify=none"
        elif selector is not None and selector.owns_index:
            reason = "its index cuts new tokens into chunks on the host"
        elif self._observers:
            reason = "observers and recall look at every step on the host"
        else:
            return
        raise UnsupportedModelError(f"{self.policy} cannot decode with all lengths on the device: {reason}")

    def _require_attached(self) -> None:
        if not self._undo:
            raise AttachmentError("this run was restored; call saccade.sparsify(model, policy) again")

    def _attach(self) -> None:
        model = self._model
        attention.register()
        try:
            self._set_attribute(model, _RUN_ATTRIBUTE, self)
            for module in support.attention_modules(model):
                self._set_attribute(module, attention.SESSION_ATTRIBUTE, self._slot)
            self._set_attribute(model, "generate", self._counting_prompt(model.generate))
            # With a static cache on an accelerator, `generate` would compile the model and recompile it at every step.
            self._set_attribute(model, "_valid_auto_compile_criteria", lambda *args, **kwargs: False)
            for name in _BATCH_METHODS:
                if hasattr(model, name):
                    self._set_attribute(model, name, _refuse_batching(name))
            self._undo.append(NativeLinears(model).restore)
            decoder = model.get_decoder()
            self._undo.append(decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
            if self.policy.rectify is not None:
                self._undo.append(decoder.register_forward_hook(self._after_forward).remove)
                if self.policy.rectify.mode == "verify":
                    self._verifier = Verifier(model, self.policy.rectify.every, self._ledger, self._session_to_verify)
                    self._set_attribute(model, "forward", self._verifier.forward)
            stock = model.config._attn_implementation
            model.set_attn_implementation(attention.NAME)
            self._undo.append(lambda: model.set_attn_implementation(stock))
        except BaseException:
            self.restore()
            raise

    def _set_attribute(self, owner: Any, name: str, value: Any) -> None:
        if name in owner.__dict__:
            earlier = owner.__dict__[name]
            self._undo.append(lambda: owner.__dict__.__setitem__(name, earlier))
        else:
            self._undo.append(lambda: owner.__dict__.pop(name, None))
        owner.__dict__[name] = value

    def _counting_prompt(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Stock `generate` that tells this run how long the prompt is: in `generate` the prompt is the input."""

        @functools.wraps(generate)
        def wrapper(inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            prompt = _prompt_length(inputs, kwargs)
            if self._verifier is not None:
                self._verifier.prepare(prompt, args, kwargs)
            before, self._generating = self._generating, prompt
            try:
                return generate(inputs, *args, **kwargs)
            finally:
                self._generating = before
                if self._verifier is not None:
                    self._verifier.finish()

        return wrapper

    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Find or install this run's session in the cache, and tell it which positions of the call are prompt."""
        self._refuse_call(module, kwargs)
        tokens = args[0] if args else kwargs.get("input_ids")
        batch, queries = (tokens if tokens is not None else kwargs["inputs_embeds"]).shape[:2]
        held = kwargs.get("past_key_values")
        if self._starts is not None:
            self._begin_fixed(held, self._starts, batch, queries)
            return args, kwargs
        if held is None and not self._uses_cache(module, kwargs):
            self._slot[:] = [self._new_session()]
            self._slot[0].begin(Call(0, queries, queries), rectified=False)
            return args, kwargs
        if held is None:
            held = kwargs["past_key_values"] = DynamicCache()
        session = self._session_in(held)
        if session.pending is not None:
            # The dense pass before this call was interrupted: its tokens are as unclean as they were.
            slots, session.clean = session.pending
            cache.end_at(held, slots)
            session.pending = None
        past = int(held.get_seq_length())
        self._slot[:] = [session]
        if self._keeps_history:
            with lasting():
                at = kwargs.get("position_ids")
                if at is None:
                    # What a model counts for itself when nobody tells it.
                    at = torch.arange(past, past + queries, device=module.device)[None]
                session.state.history.record(past, queries, batch, tokens, at)
        checking = self._verifier is not None and self._verifier.checking
        call = Call(past, queries, self._prompt_positions(past, queries), again=checking)
        if self.policy.rectify is None:
            session.begin(call, rectified=False)
            return args, kwargs
        if call.prompt < queries:
            refuse_unmovable(kwargs, tokens)
        again = self._to_run_again(session, call)
        if again is None:
            session.begin(call, rectified=True)
            return args, kwargs
        if again == 0:
            session.clean = past
            session.begin(Call(past, queries, queries), rectified=True)
            return args, kwargs
        refuse_unmovable(kwargs, tokens)
        start = past - again
        history = session.state.history
        ids, positions = history.ids(start, past + queries), history.positions(start, past + queries)
        assert ids is not None, "every decoded token's id was recorded"
        kwargs = placed(kwargs, past, start, ids, positions)
        session.pending = past, start
        cache.end_at(held, start)
        session.clean = start
        few = call.prompt == 0
        session.begin(Call(start, again + queries, again + queries, again=few), rectified=True)
        return (), kwargs

    def _begin_fixed(self, held: Any, starts: Tensor, batch: int, queries: int) -> None:
        """Prepare a call as `lengths_on_device` promises it, without a look at the device."""
        if queries != 1 or batch != starts.shape[0]:
            raise UnsupportedModelError(
                f"this call has {batch} x {queries} tokens; one for each of {starts.shape[0]} rows was promised"
            )
        cache.refuse_moving(held)
        session = self._session_in(held)
        self._slot[:] = [session]
        session.begin_fixed(*cache.advance(held, starts))

    def _session_in(self, held: Any) -> Session:
        """This run's session in a cache; installed there if another run's or none is."""
        session = cache.session_of(held)
        if session is None or not self._owns(session):
            session = self._new_session(session)
            cache.install(held, session, len(self.plan.roles.layers))
        return session

    def _to_run_again(self, session: Session, call: Call) -> int | None:
        """How many decoded tokens a call must run again; 0: it is their turn, but they were dense; None: not yet."""
        assert self.policy.rectify is not None
        dirty = session.dirty(call.past)
        if self._verifier is not None and self._verifier.drafting:
            return None
        # An index keeps at most `every` unclean tokens, so a call of several may not go beyond either.
        due = dirty + call.queries - call.prompt > self.policy.rectify.every
        if not due and (dirty == 0 or call.prompt == 0):
            return None
        return dirty if session.state.needs_selection(call.past) else 0

    def _after_forward(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Take off what was run again: the caller gets hidden states for its own tokens only."""
        session = self._slot[0]
        if session.pending is None:
            return output
        surplus = session.pending[0] - session.pending[1]
        session.pending = None
        self._ledger.rectified(surplus)
        if isinstance(output, tuple):
            return (output[0][:, surplus:], *output[1:])
        output.last_hidden_state = output.last_hidden_state[:, surplus:]
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = tuple(states[:, surplus:] for states in output.hidden_states)
        return output

    def _owns(self, session: Session) -> bool:
        return session.state.counters is self._counters

    def _session_to_verify(self, held: Any) -> Session | None:
        """The session of a cache that a one-token call would decode from; None if it is prompt, or another run's."""
        session = None if held is None else cache.session_of(held)
        if session is None or not self._owns(session):
            return None
        return session if self._prompt_positions(int(held.get_seq_length()), 1) == 0 else None

    def _prompt_positions(self, past: int, queries: int) -> int:
        if self._verifier is not None and self._verifier.dense:
            return queries
        if self._generating is not None:
            return min(max(self._generating - past, 0), queries)
        if self._decoding:
            return 0
        return queries if past == 0 or queries > 1 else 0

    def _new_session(self, earlier: Session | None = None) -> Session:
        """A session of this run; of what an earlier one knew of the cache, the feed and what is not clean go on."""
        with lasting():
            feed = earlier.state.history.continued(self._levels) if earlier is not None else TokenHistory(self._levels)
        session = Session(DecodeState(self.plan, self._counters, self._observers, self._shortcut, feed))
        if earlier is not None:
            session.clean, session.pending = earlier.clean, earlier.pending
        return session

    def _uses_cache(self, module: Any, kwargs: dict[str, Any]) -> bool:
        given = kwargs.get("use_cache")
        uses = bool(module.config.use_cache if given is None else given)
        if not uses and (self._generating is not None or self._decoding):
            raise UnsupportedModelError("use_cache=False leaves nothing to select from; saccade needs the KV cache")
        return uses

    def _refuse_call(self, module: Any, kwargs: dict[str, Any]) -> None:
        if module.training:
            raise UnsupportedModelError("the model is in training mode; call model.eval()")
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and getattr(module.config, "output_attentions", False)):
            raise UnsupportedModelError("output_attentions=True: sparse decoding has no attention matrix to return")


def sparsify(
    model: Any,
    policy: Written,
    *,
    tokenizer: Any = None,
    recall: bool = False,
    observers: Sequence[Observer] = (),
) -> Run:
    """Decode sparsely with a loaded transformers model, until `restore()` or the end of a `with` block.

    Args:
        model: a causal language model, already loaded, in eval mode; PEFT wrappers are looked through.
        policy: a `Policy`; a spec string such as `"less_is_more:budget=2048,reselect=12"`; `"auto"`, the recipe that
            lies beside the model or was published for it; the path of a recipe; or `"recipe:NAME"`, a published one.
        tokenizer: for policies that cut the text into chunks; without it those chunks have a fixed length.
        recall: measure attention recall in every layer and step; costs a pass over the keys.
        observers: called after every attention of a decoded token; for measurements of your own.

    Raises:
        UnsupportedModelError: if the model cannot run sparsely, with every reason.
        PolicyError: if the policy does not fit the model, or there is no recipe or one of another model.
        AttachmentError: if the model is already attached.
    """
    return attach(model, policy, tokenizer=tokenizer, recall=recall, observers=observers, shortcut=True)


def attach(
    model: Any,
    policy: Written,
    *,
    tokenizer: Any = None,
    recall: bool = False,
    observers: Sequence[Observer] = (),
    shortcut: bool = True,
) -> Run:
    """`sparsify` with the dense shortcut below the budget as a switch, so that tests can force the sparse path."""
    model = _unwrap(model)
    if _RUN_ATTRIBUTE in getattr(model, "__dict__", {}):
        attached = model.__dict__[_RUN_ATTRIBUTE].policy
        raise AttachmentError(f"this model is already attached with {attached}; restore() that run first")
    support.refuse_unsupported(model)
    shape = shape_of_model(model)
    chosen = recipes.resolve(policy, getattr(model, "name_or_path", None) or "", lambda: shape)
    plan = chosen.policy.plan(shape)
    plan = replace(plan, notes=(*chosen.notes, *plan.notes))
    run = Run(model, chosen.policy, plan, tokenizer=tokenizer, recall=recall, observers=observers, shortcut=shortcut)
    for note in run.notes:
        logger.warning(note)
    return run


def _unwrap(model: Any) -> Any:
    """The model below a PEFT wrapper; its adapters stay in place.

    Raises:
        UnsupportedModelError: for prompt and prefix tuning, whose virtual tokens no caller counts as prompt.
    """
    configs = getattr(model, "peft_config", None)
    learnt = [config.peft_type.value for config in configs.values() if config.is_prompt_learning] if configs else []
    if learnt:
        raise UnsupportedModelError(f"PEFT {learnt[0]} adds virtual tokens that are not part of the prompt's length")
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def _prompt_length(inputs: Any, kwargs: dict[str, Any]) -> int:
    """Positions before the first generated token; when only a new turn is passed, its mask still covers all of them."""
    given = [inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        given.append(mask)
    return max((int(tensor.shape[1]) for tensor in given if tensor is not None), default=1)


def _refuse_batching(name: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            f"{name}: continuous batching takes no registered attention; serve with vLLM instead"
        )

    return refused
