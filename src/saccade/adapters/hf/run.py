"""`sparsify`: attach a policy to a loaded transformers model, and take it off again."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoints.load import ModelSource
from ...checkpoints.shape import shape_of_model
from ...checkpoints.text import delimiter_table
from ...checkpoints.versions import cache_argument
from ...decode.capture import reasons_against_capture
from ...decode.counters import Counters
from ...decode.recall import RecallObserver
from ...decode.state import Observer
from ...decode.stats import Rectifications, RunStats
from ...errors import AttachmentError, PolicyError, SaccadeError, UnsupportedModelError
from ...methods.policy import Policy
from ...plans.plan import Plan
from ...recipes.kept import already_found
from ...recipes.recipe import Recipe
from ...recipes.resolve import PolicyLike, resolve
from ...text.feed import UNREAD
from . import attention, support
from .cache import look_over
from .call import Callers, Generate
from .finding import Finding
from .hook import ForwardHook, Guarded
from .linear import native_linears
from .rectify import Rectifier
from .upkeep import Upkeep
from .verify import Verifier

logger = logging.getLogger("saccade")

_RUN_ATTRIBUTE = "_saccade_run"
_BATCH_METHODS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


class Run:
    """A policy attached to `model`; made by `sparsify`, undone by `restore()` or at the end of a `with` block.

    All its sequences count into `counters`.
    """

    def __init__(
        self, model: Any, policy: Policy, plan: Plan, *, tokenizer: Any, recall: bool, observers: Sequence[Observer]
    ) -> None:
        self._finding: Finding | None = None
        if plan.guessed == "reselect":
            shape = shape_of_model(model)
            folder = getattr(model, "name_or_path", None) or ""
            if tokenizer is None and Path(folder).is_dir():
                with suppress(SaccadeError):  # its files are not at hand
                    tokenizer = ModelSource.locate(folder).tokenizer()
            callers = Callers()
            self._finding = Finding(model, policy, shape, tokenizer, callers)
            notes = (*plan.notes, self._finding.note)
            plan = replace(Policy.from_spec("dense").plan(shape), notes=notes, guessed=plan.guessed)
        self.policy, self.plan, self.model = policy, plan, model
        self._notes = (*plan.notes, *support.left_out(model), *support.slow_kernels(model))
        levels: Sequence[int] | None = None
        if plan.reads_text:
            if tokenizer is None:
                self._notes += (f"{policy.name}: no tokenizer was given, so chunks have a fixed length",)
            else:
                levels = delimiter_table(tokenizer, plan.codes)
        self.counters = Counters(len(plan.roles.layers))
        self._rectified = Rectifications()
        self._recall = RecallObserver(plan.roles.concerned) if recall else None
        self._observers = (*observers, self._recall) if self._recall is not None else tuple(observers)
        rectifier = None if policy.rectify is None else Rectifier(policy.phase, self._rectified)
        decoder, own_cache = support.decoder_of(model), support.has_own_cache(model)
        takes, kept = [*inspect.signature(decoder.forward).parameters], cache_argument(decoder)
        verified = policy.rectify is not None and policy.rectify.mode == "verify"
        self._hook = ForwardHook(
            plan, self.counters, self._observers, levels, rectifier, takes, kept, own_cache, verified=verified
        )
        if self._finding is not None:
            self._hook.callers, self._hook.look = self._finding.callers, self._look
        self._undo: list[Callable[[], None]] = []
        self._attach()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about how the policy was bound to this model."""
        return (*self._notes, UNREAD) if bool(self._hook.latest.known[2]) else self._notes

    def stats(self) -> RunStats:
        """Steps, tokens attended and, if asked for, recall per layer, over everything decoded so far.

        Index bytes and build time are those of the latest cache.
        """
        index_bytes, build_seconds, _ = self._hook.latest.known
        return RunStats.of(
            str(self.policy),
            self.counters,
            self._recall,
            index_bytes=index_bytes,
            build_seconds=build_seconds,
            rectification=self._rectified,
        )

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside, every position decodes sparsely, also when several come at once or `generate` reads them.

        In a generator the block ends before each `yield`; a call of the model while it is suspended raises. So does a
        policy whose layer the probe has not found yet.
        """
        self._require_attached()
        if self._finding is not None:
            self._finding.recipe()
        with self._hook.callers.holding(decoding=True):
            yield

    @contextmanager
    def lengths_on_device(self, starts: Tensor) -> Iterator[None]:
        """Inside, calls decode one token per row on a filled `StaticCache`, or run a pass; no host reads the device.

        Every call does the same to the cache's whole capacity, so that a CUDA graph can hold it; `graph.GraphedStep`
        does. Where the policy has an index of text or is rectified, `upkeep` goes ahead of each and says what it is
        fed. Masks are not looked at; `starts` are int32 `[B]` on the cache's device, first real slot of each row.

        Raises:
            UnsupportedModelError: if the policy needs the host between steps, with every reason.
        """
        self._require_attached()
        if self._finding is not None:
            self._finding.recipe()
        self.refuse_capture()
        with self._hook.callers.holding(starts=starts):
            yield

    def upkeep(self, cache: Any, starts: Tensor) -> Upkeep:
        """Who prepares each of those calls on a filled `StaticCache`; `starts` as there."""
        look_over(cache, session := self._hook.session_in(cache))
        return Upkeep(session, cache, starts, self._hook.rectifier)

    def refuse_capture(self) -> None:
        """Raise an UnsupportedModelError, with every reason, unless a step needs nothing of the host."""
        reasons = reasons_against_capture(self.plan, self.policy.rectify, self._observers)
        if self.plan.roles.mixed:
            reasons.append("layers without full attention keep their lengths on the host")
        if reasons:
            told = "; ".join(reasons)
            raise UnsupportedModelError(f"{self.policy} cannot decode with all lengths on the device: {told}")

    def recipe(self) -> Recipe:
        """The policy and its layers for this model, as a recipe to write; what the probe has found among them.

        Raises:
            PolicyError: a layer is looked for, and no prompt was long enough yet.
        """
        if self._finding is not None:
            return self._finding.recipe()
        return Recipe(shape_of_model(self.model), self.policy, self.policy.options.model_dump().get("reselect"))

    def restore(self) -> None:
        """Give the model its stock behaviour back; does nothing the second time."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Run:
        self._require_attached()
        return self

    def __exit__(self, *raised: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "attached" if self._undo else "restored"
        return "\n".join((f"<saccade.Run {self.policy} on {type(self.model).__name__}, {state}>", *self.notes))

    def _look(self, ids: Tensor, mask: Any) -> Plan | None:
        """The plan with the layer that a prompt has shown; None if it has shown none."""
        assert self._finding is not None, "it looks"
        if not self._finding.look(ids, mask) or self._finding.found is None:
            return None
        self.policy = self._finding.found
        self.plan = self.policy.plan(self._finding.shape)
        return self.plan

    def _require_attached(self) -> None:
        if not self._undo:
            raise AttachmentError("this run was restored; call saccade.sparsify(model, policy) again")

    def _attach(self) -> None:
        model, hook, rectify = self.model, self._hook, self.policy.rectify
        attention.register()
        try:
            self._set_attribute(model, _RUN_ATTRIBUTE, self)
            decoder = support.decoder_of(model)
            stock, concerned = decoder.config._attn_implementation, set(self.plan.roles.concerned)
            modules = support.attention_modules(decoder)
            more = any(attention.has_sinks(one) or attention.soft_cap_of(one) is not None for one in modules)
            own = self.plan.roles.mixed or more
            eager = own and any(attention.is_eager(module, stock) for module in modules)
            for module in modules:
                if module.layer_idx in concerned:
                    self._set_attribute(module, attention.SESSION_ATTRIBUTE, hook.at_hand)
                if own:
                    self._set_attribute(module, attention.STOCK_ATTRIBUTE, attention.stock_of(module, stock))
            ending = None
            if rectify is not None and rectify.mode == "verify":
                verifier = Verifier(model, rectify.every, self._rectified, hook)
                ending = verifier.ending
                self._set_attribute(model, "forward", verifier)
            generate = Generate(model, model.generate, hook.callers, support.refuse_generation, ending)
            self._set_attribute(model, "generate", generate)
            # With a static cache on an accelerator, `generate` would compile the model and recompile it at every step.
            self._set_attribute(model, "_valid_auto_compile_criteria", _never)
            for name in _BATCH_METHODS:
                if hasattr(model, name):
                    self._set_attribute(model, name, partial(_refuse_batching, name))
            self._undo += [one.restore for one in native_linears(model)]
            self._set_attribute(decoder, "forward", Guarded(decoder.forward, hook))
            self._undo.append(decoder.register_forward_pre_hook(hook.before, with_kwargs=True).remove)
            self._undo.append(decoder.register_forward_hook(hook.after, always_call=True).remove)
            # Of the decoder alone: what reads images keeps its own.
            decoder.set_attn_implementation(attention.EAGER if eager else attention.NAME)
            self._undo.append(partial(decoder.set_attn_implementation, stock))
        except BaseException:
            self.restore()
            raise

    def _set_attribute(self, owner: Any, name: str, value: Any) -> None:
        earlier = [owner.__dict__[name]] if name in owner.__dict__ else []
        self._undo.append(partial(_give_back, owner, name, *earlier))
        owner.__dict__[name] = value


def _give_back(owner: Any, name: str, *earlier: Any) -> None:
    """Give an object's attribute its `earlier` value back, none if there was none.

    Like all that a model is given here no closure: it is copied and pickled with the model, and then means the copy's.
    """
    owner.__dict__.pop(name, None)
    owner.__dict__.update(zip((name,), earlier, strict=False))


def sparsify(
    model: Any, policy: PolicyLike, *, tokenizer: Any = None, recall: bool = False, observers: Sequence[Observer] = ()
) -> Run:
    """Decode sparsely with a loaded transformers model, until `restore()` or the end of a `with` block.

    Args:
        model: a causal language model, already loaded, in eval mode; PEFT wrappers are looked through.
        policy: a `Policy`; a spec string such as `"less_is_more:budget=2048,reselect=12"`; `"auto"`, the recipe that
            lies beside the model or was published for it; the path of a recipe; or `"recipe:NAME"`, a published one.
        tokenizer: for policies that cut the text into chunks; without it those chunks have a fixed length.
        recall: measure both recalls of heads with a set in every layer and step; costs a pass over the keys.
        observers: called after every attention of a decoded token; for measurements of your own.

    Raises:
        UnsupportedModelError: if the model cannot run sparsely, with every reason.
        PolicyError: if the policy does not fit the model, or there is no recipe or one of another model.
        AttachmentError: if the model is already attached.
    """
    model = _unwrap(model)
    if _RUN_ATTRIBUTE in getattr(model, "__dict__", {}):
        attached = model.__dict__[_RUN_ATTRIBUTE].policy
        raise AttachmentError(f"this model is already attached with {attached}; restore() that run, or copy before")
    support.refuse_unsupported(model)
    decoder = support.decoder_of(model)
    marked = any(attention.SESSION_ATTRIBUTE in vars(module) for module in support.attention_modules(decoder))
    if marked or decoder.config._attn_implementation in (attention.NAME, attention.EAGER):
        raise AttachmentError("this model shares layers or its configuration with an attached one; restore() that run")
    shape = shape_of_model(model)
    name = getattr(model, "name_or_path", None) or ""
    chosen = resolve(policy, name, lambda: shape)
    plan, policy = chosen.policy.plan(shape), chosen.policy
    if plan.guessed == "reselect" and (known := already_found(policy, name, shape)) is not None:
        policy, chosen = known[0], replace(chosen, notes=(*chosen.notes, known[1]))
        plan = policy.plan(shape)
    support.refuse_rewinding(policy, shape)
    if plan.guessed == "reselect" and (shape.kinds or shape.sources):
        advice = f"find it with `saccade calibrate layers --policy {policy.name}`, or name one by hand, reselect=LAYER"
        raise PolicyError(
            f"{policy}: no layer is known for this model, whose kinds of layers no prompt tells: {advice}"
        )
    plan = replace(plan, notes=(*chosen.notes, *(plan.notes if plan.guessed is None else ())))
    run = Run(model, policy, plan, tokenizer=tokenizer, recall=recall, observers=observers)
    for note in run.notes:
        logger.warning(note)
    return run


def attached(model: Any, policy: Policy, tokenizer: Any) -> Run:
    """A run of which nobody is told anything, for measurements of our own."""
    return Run(model, policy, policy.plan(shape_of_model(model)), tokenizer=tokenizer, recall=False, observers=())


def _unwrap(model: Any) -> Any:
    """The model below a PEFT wrapper, whose adapters stay in place; an UnsupportedModelError for virtual tokens."""
    configs = getattr(model, "peft_config", None)
    learnt = [config.peft_type.value for config in configs.values() if config.is_prompt_learning] if configs else []
    if learnt:
        raise UnsupportedModelError(f"PEFT {learnt[0]} adds virtual tokens that are not part of the prompt's length")
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def _refuse_batching(name: str, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedModelError(f"{name}: continuous batching takes no registered attention; serve with vLLM instead")


def _never(*args: Any, **kwargs: Any) -> bool:
    return False
