"""The lossless mode: sparse steps draft, one dense pass decides, and the caller only ever sees dense logits."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...checkpoints.versions import cache_argument
from ...decode.stats import Rectifications
from ...errors import UnsupportedModelError
from . import cache
from .call import Ending, named
from .hook import ForwardHook
from .rectify import placed, refuse_unmovable
from .session import Drafts, Session

_DRAFTERS = ("assistant_model", "prompt_lookup_num_tokens")


class Verifier:
    """Stands in for a model's `forward` while it decodes (ReSA, appendix B).

    A decoding call drafts `every` tokens sparsely, then runs its own token and the drafts densely in one pass. It
    returns the logits behind its own token. A draft stands iff the caller feeds it next: then its dense logits are
    there already. Otherwise what lies behind is forgotten. Rows of a batch go on together, so a draft stands when it
    does in every row that has not ended. Drafts are counted in `done`; the model's hook is told what each call is for.
    """

    def __init__(self, model: Any, every: int, done: Rectifications, hook: ForwardHook) -> None:
        self._model, self._every, self._done, self._hook = model, every, done, hook
        self._stock = model.forward
        self._takes, self._kept = [*inspect.signature(self._stock).parameters], cache_argument(model)
        # `generate` reads the signature to know what it may pass.
        functools.update_wrapper(self, self._stock)

    def ending(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ending:
        """Where the text ends that a `generate` call is to make; raises for what drafts cannot follow."""
        given = kwargs.get("generation_config") or (args[0] if args else None)

        def setting(name: str) -> Any:
            # As transformers has it: an argument counts even if it is None, a configuration where it is no default.
            if name in kwargs:
                return kwargs[name]
            values = (getattr(config, name, None) for config in (given, self._model.generation_config))
            default = getattr(type(self._model.generation_config)(), name, None)
            return next((value for value in values if value is not None and value != default), default)

        if (setting("num_beams") or 1) > 1:
            raise UnsupportedModelError(
                "rectify mode verify cannot follow beams: every reordering would reject all drafts; use mode overwrite"
            )
        for name in _DRAFTERS:
            if setting(name) is not None:
                raise UnsupportedModelError(f"rectify mode verify drafts by itself; {name} would draft a second time")
        if setting("output_hidden_states"):
            raise UnsupportedModelError("rectify mode verify keeps logits only; output_hidden_states is not available")
        ends = setting("eos_token_id")
        tokens = None if ends is None else torch.as_tensor(ends, device=self._model.device).flatten()
        new, longest = setting("max_new_tokens"), setting("max_length")
        prompt = self._hook.callers.here.prompt
        assert prompt is not None, "inside of `generate` its length is known"
        return Ending(tokens, prompt + new - 1 if new is not None else longest - 1 if longest is not None else None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `forward` takes few things by position; the rest of this class wants names.
        inputs = named(self._takes, self._kept, args, kwargs)
        held, ids = inputs.get(self._kept), inputs.get("input_ids")
        session = self._hook.decoding_from(held)
        if held is None or session is None or ids is None or ids.shape[1] > 1 or self._wants_more_than_logits(inputs):
            if session is not None:
                session.drafts = None
            return self._densely(inputs)
        refuse_unmovable(inputs, ids)
        self._see_ends(ids)
        past = int(held.get_seq_length())
        if self._stands(session, past, inputs):
            return self._from_draft(session, past, held)
        session.drafts = None
        return self._cycle(session, past, inputs, held)

    def _wants_more_than_logits(self, inputs: dict[str, Any]) -> bool:
        config = self._model.config
        wanted = inputs.get("output_hidden_states")
        hidden = getattr(config, "output_hidden_states", False) if wanted is None else wanted
        return bool(hidden) or inputs.get("labels") is not None or inputs.get("return_dict") is False

    def _densely(self, inputs: dict[str, Any]) -> Any:
        """Prompt, several given tokens at once, or more than logits: there is nothing to draft."""
        with self._hook.callers.knowing(purpose="dense"):
            return self._stock(**inputs)

    def _see_ends(self, ids: Tensor) -> None:
        """Rows that were fed an end are the caller's padding from now on: their drafts need not stand."""
        ending = self._hook.callers.here.ending
        if ending is None or ending.tokens is None:
            return
        ended, before = torch.isin(ids[:, 0], ending.tokens.to(ids.device)), ending.rows
        ending.rows = ended if before is None or before.shape != ended.shape else before | ended

    def _stands(self, session: Session, past: int, inputs: dict[str, Any]) -> bool:
        """Whether the fed token is the next draft, seen from the same position over the same tokens."""
        drafts, ids = session.drafts, inputs["input_ids"]
        if drafts is None or not drafts.tokens.shape[1] or drafts.slot != past or len(drafts.tokens) != len(ids):
            return False
        if not _same_view(inputs.get("attention_mask"), drafts.mask, drafts.start + 1):
            return False
        at, first = inputs.get("position_ids"), drafts.positions
        if at is None or first is None:
            if at is not first:
                return False
        elif not torch.equal(at, first + (past - drafts.start)):
            return False
        agrees = drafts.tokens[:, 0] == ids[:, 0]
        ending = self._hook.callers.here.ending
        if ending is not None and ending.rows is not None and ending.rows.shape == agrees.shape:
            agrees = agrees | ending.rows
        return bool(agrees.all())

    def _from_draft(self, session: Session, past: int, held: Any) -> Any:
        """The token was run densely already: show it in the cache again and hand out its logits."""
        assert session.drafts is not None
        cache.end_at(held, past + 1)
        session.settle(past + 1)
        self._done.add(accepted=1)
        return self._output(session.drafts.take(), held)

    def _cycle(self, session: Session, past: int, inputs: dict[str, Any], held: Any) -> Any:
        """Draft behind the fed token, run all of it densely, keep the logits."""
        count = self._drafts_that_fit(past, held)
        if not session.state.needs_selection(past + 1 + max(count, 0)):
            return self._densely(inputs)
        if count < 1:
            self._done.add(passes=1)
            return self._densely(inputs)
        tokens = self._draft(past, count, inputs, held)
        run = placed(inputs, past, past, tokens, self._positions(inputs, 0, count + 1))
        if "logits_to_keep" in self._takes:
            run["logits_to_keep"] = 0
        end = past
        try:
            with self._hook.callers.knowing(purpose="check"):
                logits = self._stock(**run).logits
            end = past + 1
        finally:
            cache.end_at(held, end)
            session.settle(end)
        seen = map(inputs.get, ("attention_mask", "position_ids"))
        session.drafts = Drafts(past + 1, past, tokens[:, 1:], logits[:, 1:], *seen)
        self._done.add(passes=1, rewritten=count, drafted=count)
        return self._output(logits[:, :1], held)

    def _draft(self, past: int, count: int, inputs: dict[str, Any], held: Any) -> Tensor:
        """The fed token and `count` sparsely decoded ones, int64 `[B, count + 1]`; the cache ends where it did."""
        tokens = [inputs["input_ids"]]
        try:
            with self._hook.callers.knowing(purpose="draft"):
                for number in range(count):
                    step = placed(inputs, past, past + number, tokens[-1], self._positions(inputs, number, 1))
                    tokens.append(self._stock(**step).logits[:, -1:].argmax(-1).to(tokens[0].dtype))
        finally:
            cache.end_at(held, past)
        return torch.cat(tokens, dim=1)

    def _output(self, logits: Tensor, held: Any) -> Any:
        return CausalLMOutputWithPast(logits=logits, **{self._kept: held})  # type: ignore[arg-type]  # any float tensor

    @staticmethod
    def _positions(inputs: dict[str, Any], first: int, count: int) -> Tensor | None:
        """Position ids of tokens number `first` to `first + count` from the fed one on; None if nobody gives them."""
        given: Tensor | None = inputs.get("position_ids")
        if given is None:
            return None
        return given[:, -1:] + torch.arange(first, first + count, device=given.device)

    def _drafts_that_fit(self, past: int, held: Any) -> int:
        """No more drafts than the text, the cache and the model's positions hold behind the fed token."""
        room, ending = cache.room(held), self._hook.callers.here.ending
        ends = (
            None if room is None else past + room,
            getattr(self._model.config, "max_position_embeddings", None),
            None if ending is None else ending.last,
        )
        return min(self._every, *(end - past - 1 for end in ends if end is not None))


def _same_view(mask: Any, earlier: Any, slots: int) -> bool:
    """Whether two calls' masks hide the same of the first `slots` slots."""
    if mask is None or earlier is None:
        return mask is earlier
    if isinstance(mask, dict) and isinstance(earlier, dict):
        return all(_same_view(part, earlier.get(kind), slots) for kind, part in mask.items())
    if isinstance(mask, dict) or isinstance(earlier, dict) or mask.dim() != earlier.dim():
        return False
    seen, before = (part[..., :slots] if part.dim() == 2 else part[:, :, -1, :slots] for part in (mask, earlier))
    return seen.shape == before.shape and torch.equal(seen, before)
