"""The lossless mode: sparse steps draft, one dense pass decides, and the caller only ever sees dense logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...errors import UnsupportedModelError
from . import cache
from .inputs import placed, refuse_unmovable
from .ledger import Ledger
from .session import Drafts, Session

_DRAFTERS = ("assistant_model", "prompt_lookup_num_tokens")


class Verifier:
    """Stands in for a model's `forward` while it decodes (ReSA, appendix B).

    A decoding call drafts `every` tokens sparsely, then runs its own token and the drafts densely in one pass. It
    returns the logits behind its own token. A draft stands iff the caller feeds it next: then its dense logits are
    there already. Otherwise what lies behind is forgotten. Rows of a batch go on together, so a draft stands when it
    does in every row that has not ended.

    Args:
        model: the attached model.
        every: tokens drafted at a time.
        ledger: where drafts are counted.
        is_prompt: whether a call at so many filled slots with so many queries feeds prompt.
    """

    def __init__(self, model: Any, every: int, ledger: Ledger, is_prompt: Callable[[int, int], bool]) -> None:
        self.drafting = self.verifying = False
        self._model = model
        self._every = every
        self._ledger = ledger
        self._is_prompt = is_prompt
        self._ends: Tensor | None = None
        self._ended: Tensor | None = None
        self._stock = model.forward
        self._signature = inspect.signature(self._stock)

    @property
    def forward(self) -> Callable[..., Any]:
        """What takes the place of the model's own `forward`."""

        # `generate` reads the signature to know what it may pass.
        @functools.wraps(self._stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        return forward

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a call of `generate` before any work.

        Raises:
            UnsupportedModelError: for what drafts cannot follow.
        """
        config = kwargs.get("generation_config") or (args[0] if args else None) or self._model.generation_config

        def setting(name: str) -> Any:
            given = kwargs.get(name)
            return given if given is not None else getattr(config, name, None)

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
        if ends is None:
            ends = self._model.generation_config.eos_token_id
        self._ends = None if ends is None else torch.as_tensor(ends, device=self._model.device).flatten()
        self._ended = None

    def finish(self) -> None:
        """The call of `generate` is over: what ends a row is no longer known."""
        self._ends = self._ended = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # `forward` takes few things by position; the rest of this class wants names.
        inputs = {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}
        held, ids = inputs.get("past_key_values"), inputs.get("input_ids")
        session = None if held is None else cache.session_of(held)
        past = 0 if held is None else int(held.get_seq_length())
        queries = 1 if ids is None else ids.shape[1]
        if session is None or ids is None or queries > 1 or self._is_prompt(past, queries):
            return self._densely(session, inputs)
        refuse_unmovable(inputs, ids)
        self._see_ends(ids)
        if self._stands(session, past, ids):
            return self._from_draft(session, held)
        session.drafts = None
        return self._cycle(session, past, inputs, held)

    def _densely(self, session: Session | None, inputs: dict[str, Any]) -> Any:
        """Prompt, and several given tokens at once: there is nothing to draft."""
        if session is not None:
            session.drafts = None
        self.verifying = True
        try:
            return self._stock(**inputs)
        finally:
            self.verifying = False

    def _see_ends(self, ids: Tensor) -> None:
        """Rows that were fed an end are the caller's padding from now on: their drafts need not stand."""
        if self._ends is None:
            return
        ended = torch.isin(ids[:, 0], self._ends.to(ids.device))
        before = self._ended
        self._ended = ended if before is None or before.shape != ended.shape else before | ended

    def _stands(self, session: Session, past: int, ids: Tensor) -> bool:
        drafts = session.drafts
        if drafts is None or not len(drafts) or drafts.slot != past or drafts.tokens.shape[0] != ids.shape[0]:
            return False
        agrees = drafts.tokens[:, 0] == ids[:, 0]
        if self._ended is not None and self._ended.shape == agrees.shape:
            agrees = agrees | self._ended
        return bool(agrees.all())

    def _from_draft(self, session: Session, held: Any) -> Any:
        """The token was run densely already: show it in the cache again and hand out its logits."""
        assert session.drafts is not None and session.clean is not None
        cache.move_end(held, 1)
        session.clean += 1
        self._ledger.accepted()
        return self._output(session.drafts.take(), held)

    def _cycle(self, session: Session, past: int, inputs: dict[str, Any], held: Any) -> Any:
        """Draft behind the fed token, run all of it densely, keep the logits."""
        count = self._drafts_that_fit(past, held)
        if count < 1 or not session.state.needs_selection(past + 1 + count):
            return self._densely(session, inputs)
        ids, given = inputs["input_ids"], inputs.get("position_ids")
        positions = None if given is None else given[:, -1:] + torch.arange(count + 1, device=ids.device)
        tokens = [ids]
        self.drafting = True
        try:
            for number in range(count):
                at = None if positions is None else positions[:, number : number + 1]
                step = placed(inputs, past, past + number, tokens[-1], at)
                tokens.append(self._stock(**step).logits[:, -1:].argmax(-1).to(ids.dtype))
        finally:
            self.drafting = False
            cache.move_end(held, past - int(held.get_seq_length()))
        run = placed(inputs, past, past, torch.cat(tokens, dim=1), positions)
        if "logits_to_keep" in self._signature.parameters:
            run["logits_to_keep"] = 0
        self.verifying = True
        try:
            logits = self._stock(**run).logits
        finally:
            self.verifying = False
        cache.move_end(held, -count)
        session.clean = past + 1
        session.drafts = Drafts(past + 1, run["input_ids"][:, 1:], logits[:, 1:])
        self._ledger.rectified(count)
        self._ledger.drafted(count)
        return self._output(logits[:, :1], held)

    def _drafts_that_fit(self, past: int, held: Any) -> int:
        """No more drafts than the cache and the model's positions hold behind the fed token."""
        count = self._every
        room = cache.room(held)
        if room is not None:
            count = min(count, room - 1)
        limit = getattr(self._model.config, "max_position_embeddings", None)
        return count if limit is None else min(count, limit - past - 1)

    def _output(self, logits: Tensor, held: Any) -> Any:
        return CausalLMOutputWithPast(logits=logits, past_key_values=held)  # type: ignore[arg-type]  # any float tensor
