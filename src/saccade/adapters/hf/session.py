"""A session: one cache under one run. It knows which positions are prompt and where each row starts."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...decode.state import DecodeState
from ...errors import UnsupportedModelError
from ...plans.rectify import Clean
from ...types import KVView, Rows
from .call import Anew, Call

HIDES = -1e4  # what hides a token if it, or less, is added to its score


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors made inside may be written in any later call: they belong to no graph and are no inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(slots=True)
class Drafts:
    """Tokens drafted behind slot `start`, with the logits that dense attention gives behind each of them.

    Attributes:
        slot: slot of the next draft.
        start: slot of the token that was fed to the call.
        tokens: int64 `[B, n]`; the next one first.
        logits: `[B, n, V]`.
        mask, positions: what the call that drafted was given.
    """

    slot: int
    start: int
    tokens: Tensor
    logits: Tensor
    mask: Any
    positions: Tensor | None

    def take(self) -> Tensor:
        """The logits `[B, 1, V]` behind the next draft, which was fed."""
        logits = self.logits[:, :1]
        self.slot, self.tokens, self.logits = self.slot + 1, self.tokens[:, 1:], self.logits[:, 1:]
        return logits


class Session:
    """What lives beside one cache: the decode state, the metadata of the step at hand, and drafted tokens.

    Attributes:
        final: how far the cache is clean.
        keeping: layers whose keys its cache holds; none where there is no cache.
        fixed: that cache is static, and shows more slots than are filled.
        paged: its rows share the pages of a text.
        put_back: undoes what the call at hand has changed in its cache; gives the types of layers of which it cannot.
        drafts: what verification has found and nobody has asked for yet.
        calls: how many forward calls there were, replays of a graph not among them.
        answered, stored: layers that saccade's attention has answered in the call at hand, and that the cache has.
        spoilt: why its cache is no longer what a text has left in it; None as it should be.
        latest: of its run, which keeps what is to be known of this session for longer than this session.
        promised: tokens of a row that the next such call brings, as `Upkeep` has prepared it; 0 if nobody has.
    """

    def __init__(self, state: DecodeState, final: Clean) -> None:
        self.state, self.final, self.call, self.calls = state, final, Call(0, 0, 0), 0
        self.answered, self.stored = set[int](), set[int]()
        self.keeping, self.fixed, self.paged = tuple[int, ...](), False, False
        self.put_back: Callable[[Callable[[int], None]], Sequence[str]] | None = None
        self.drafts: Drafts | None = None
        self.promised = 0
        self.spoilt: str | None = None
        self.latest: Latest | None = None
        self._steps: list[Rows] = []

    def __del__(self) -> None:
        if (latest := getattr(self, "latest", None)) is not None:
            latest.note(self)

    def unclean(self, past: int) -> int:
        """How many of the last of `past` slots were written by sparse steps; a cache found filled is clean."""
        self.final = self.final.taken_back(past)
        return max(past - self.final.boundary, 0)

    def record(self, past: int, queries: int, batch: int, ids: Tensor | None, positions: Tensor | None) -> None:
        """Note what a call feeds, as `TokenHistory.record`; slots that were filled unseen count as clean."""
        if self.state.history.record(past, queries, batch, ids, positions):
            self.final = self.final.at(past)

    def tell(self, ids: Tensor) -> None:
        """Note which tokens int64 `[B, n]` somebody else has fed, densely; those that were seen here stay."""
        known, stop = self.state.history.length, ids.shape[1]
        if stop > known:
            self.state.history.record(known, stop - known, ids.shape[0], ids[:, known:], None)
            self.final = self.final.at(max(self.final.boundary, stop))

    def settle(self, slots: int) -> None:
        """The cache ends at slot `slots` and is clean; of what was fed behind it, some may be settled later."""
        self.state.history.length = slots
        self.final = self.final.at(slots)

    def end(self) -> None:
        """End the call at hand; if it was interrupted, its cache is put back, and what was unclean is so again."""
        call, self.call = self.call, replace(self.call, hidden=0, slots=None)
        if self.put_back is not None:
            if call.hidden:
                self.final = self.final.at(call.past)
            put_back, self.put_back, self.spoilt = self.put_back, None, "its layers"
            self.spoilt = ", ".join(put_back(self.state.history.forget)) or None

    def begin(self, call: Call, *, covered: bool = False) -> None:
        """Start a forward call; rows are prepared when its first layer asks. `covered` as in `Clean.after`."""
        # First: if it is interrupted from here on, what is clean is told by it.
        self.call, self.final = call, self.final.taken_back(call.past)
        if call.prompt:
            self.final = self.final.after(call.past, call.prompt, dense=True, covered=covered)
        if call.prompt and not call.again:
            self.state.history.prompt = call.past + call.prompt
        self._start(call, [])

    def begin_on(self, rows: Rows, slots: Tensor | None = None) -> None:
        """Start a call on `rows` as they are behind it: one decoded token per row, or a pass over the last ones.

        `slots`, int64 `[n]`, are where every layer puts the tokens if only the device knows lengths; the `bounds` of
        rows are None then. To the host every such call ends at the bound: all have the same shapes, and an index as
        many tokens to take in. How far the cache is clean, `Upkeep` has noted.
        """
        count = 1 if slots is None else slots.shape[0]
        again = count > 1
        self._start(Call(rows.max_len - count, count, count if again else 0, again, slots=slots), [rows])

    def permute(self, layer: int, rows: Tensor) -> None:
        """Let batch row `i` of a layer continue what row `rows[i]` was (beam search, batch selection)."""
        if layer == self.state.plan.roles.concerned[0]:
            self.state.indexes.permute(rows)
            self.state.history.permute(rows)
            self.drafts = None

    def reset(self) -> None:
        """Forget everything about the sequences; the cache was emptied."""
        self.state = self.state.fresh()
        self.put_back = self.drafts = self.spoilt = None

    def views(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> list[KVView]:
        """The cache, keys and values `[B, Hkv, T, d]` by strides, as each decoding position of this call sees it.

        A call that runs tokens again is seen as a whole: there is one view, up to its last token.

        The mask is bool `[B, 1, queries, T]` as transformers made it, or None if nothing is padded.
        """
        self._steps = self._steps or self._prepare(keys, mask)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        return [KVView(k, v, rows) for rows in self._steps]

    def _start(self, call: Call, steps: list[Rows]) -> None:
        self.call, self._steps = call, steps
        self.answered, self.stored = set(), set()
        self.promised = 0
        self.calls += 1
        self.state.begin(call.past, self.final.boundary)

    def _prepare(self, keys: Tensor, mask: Tensor | None) -> list[Rows]:
        call, batch = self.call, keys.shape[0]
        starts = [0] * batch if mask is None else _row_starts(mask, call)
        table = torch.arange(batch, dtype=torch.int32, device=keys.device)[:, None]
        steps, stop = [], call.past + call.queries
        for length in range(stop if call.again else call.past + call.prompt + 1, stop + 1):
            # A query that is padding itself has no tokens yet; its own slot keeps it finite.
            first = [min(start, length - 1) for start in starts]
            steps.append(Rows.on_host(table, first, [length - start for start in first], max_len=length))
        return steps


class Latest(Anew):
    """A run's latest session of any thread, which lives as long as its cache does, and what is to be known of it."""

    def __init__(self) -> None:
        self._weak: weakref.ref[Session] | None = None
        self._number, self._known = 0, tuple[int, float, Tensor | bool]((0, 0.0, False))

    @property
    def session(self) -> Session | None:
        """The session, while it lives."""
        return None if self._weak is None else self._weak()

    @property
    def known(self) -> tuple[int, float, Tensor | bool]:
        """Bytes of its indexes, seconds that their first update took, and whether text of it was not read."""
        if self.session is not None:
            self.note(self.session)
        return self._known

    def enter(self, session: Session) -> None:
        """Let a session be the latest."""
        if self.session is not session:
            session.latest, self._weak, self._number = self, weakref.ref(session), id(session)

    def note(self, session: Session) -> None:
        """Note what is known of a session, if it is the latest."""
        if self._number == id(session):
            indexes = session.state.indexes
            self._known = indexes.nbytes, indexes.build_seconds, session.state.history.unread


class AtHand(Anew, threading.local):
    """The session of a model's call at hand, in each thread its own: a call never leaves its thread."""

    session: Session | None = None


def _row_starts(mask: Tensor, call: Call) -> list[int]:
    """First visible slot of each row; an UnsupportedModelError unless queries see all from there to their own."""
    length, prompt = call.past + call.queries, 0 if call.again else call.prompt
    seen = mask[:, :, prompt:, :length]
    visible = seen if seen.dtype == torch.bool else seen == 0
    if seen.dtype != torch.bool and not bool((visible | (seen <= HIDES)).all()):
        raise UnsupportedModelError(
            "the attention mask adds to scores of tokens that it shows; saccade decodes under masks of 0 and what hides"
        )
    last = visible[:, 0, -1]
    starts = torch.where(last.any(-1), last.int().argmax(-1), length)
    slots = torch.arange(length, device=mask.device)
    causal = slots <= slots[call.past + prompt :, None]
    if not torch.equal(visible, ((slots >= starts[:, None])[:, None] & causal)[:, None].expand_as(visible)):
        raise UnsupportedModelError(
            "the attention mask has holes or is not causal; saccade decodes rows that are padded in front of their "
            "first token only: tokenizer.padding_side='left', and no padding between turns"
        )
    return [int(start) for start in starts.tolist()]
