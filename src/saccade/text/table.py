"""Where the text of many rows is cut into chunks, on the device: the same chunks for every layer that reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..types import Intake
from .feed import TokenFeed
from .levels import WEAKEST

_REMEMBERED = 64
"""Changes: a call of several tokens brings one layer through all of them before the next layer sees the first."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Sizes of chunks: the first starts at `first`; a chunk has `shortest` to `longest` tokens.

    It has `longest` where some token of its window is unknown.
    """

    first: int
    shortest: int
    longest: int

    def most(self, stop: int) -> int:
        """How many chunks there can be before position `stop`."""
        return max(stop - self.first, 0) // self.shortest


@dataclass(frozen=True, slots=True)
class Change:
    """What the latest cut has changed.

    Attributes:
        rows: of the table.
        first: int64 `[n]`, the first chunk that is new, other or gone.
        last: int64 `[n]`, chunks that there are now, or were before if these are more.
        most: host bound on `last - first`.
    """

    rows: tuple[int, ...]
    first: Tensor
    last: Tensor
    most: int

    def parts(self, rows: int) -> Iterator[Change]:
        """The same in pieces of at most so many rows."""
        for start in range(0, len(self.rows), rows):
            part = slice(start, start + rows)
            yield Change(self.rows[part], self.first[part], self.last[part], self.most)


class ChunkTable:
    """Chunks of R rows; a chunk is cut once `longest` tokens stand behind its start.

    So its end depends on these tokens alone: not on when it was cut, on what was taken back since, or on how the tokens
    were fed. Rows of at most `longest` tokens never move it in memory.

    Attributes:
        cuts, text: sizes, and who knows levels; without text all of it is unknown.
        edges: int32 `[R, C + 1]`, chunk i of a row has logical positions `edges[i]..edges[i + 1]`.
        counts: int32 `[R]`, chunks of each row.
        ends: int32 `[R]`, where each row's last chunk ends; 0 without any.
        stops: on the host, the tokens of each row that were looked at.
        version: how many changes there were.
    """

    def __init__(
        self, cuts: Cuts, text: TokenFeed | None, rows: int, device: torch.device, *, longest: int = 0
    ) -> None:
        self.cuts, self.text = cuts, text
        room = max(cuts.most(longest), 1)
        self.edges = torch.full((rows, room + 1), cuts.first, dtype=torch.int32, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ends = torch.zeros_like(self.counts)
        self.stops = [0] * rows
        self.version = 0
        self._changes: deque[Change] = deque(maxlen=_REMEMBERED)

    def take_in(self, new: Iterable[Intake]) -> None:
        """Bring rows up to date with what they were fed."""
        changed = [
            (one.slot, one.origin, min(held, one.kept, one.stop), one.stop, max(held, one.stop))
            for one, held in ((one, self.stops[one.slot]) for one in new)
            if one.stop != held or one.kept < held
        ]
        if not changed:
            return
        numbers, starts, known, ends, furthest = (tuple(column) for column in zip(*changed, strict=True))
        first, last = self._cut(numbers, starts, known, ends)
        # Only now: who was interrupted cuts again.
        for row, stop in zip(numbers, ends, strict=True):
            self.stops[row] = stop
        # A chunk that starts `longest` tokens before what is known stands.
        behind = max(
            end - max(old - self.cuts.longest, self.cuts.first) for old, end in zip(known, furthest, strict=True)
        )
        self._changes.append(Change(numbers, first, last, max(behind, 0) // self.cuts.shortest + 1))
        self.version += 1

    def since(self, version: int) -> Change | None:
        """What has changed since an earlier version; None: nothing."""
        missed = self.version - version
        if missed == 0:
            return None
        if missed == 1 and self._changes:
            return self._changes[-1]
        changes = [self._of_all()] if missed > len(self._changes) else list(self._changes)[-missed:]
        rows = tuple(sorted({row for change in changes for row in change.rows}))
        first = self.counts.new_full((len(self.stops),), torch.iinfo(torch.int32).max).long()
        last = torch.zeros_like(first)
        for change in changes:
            chosen = torch.tensor(change.rows, device="cpu").to(first.device, non_blocking=True)
            first.scatter_reduce_(0, chosen, change.first, "amin")
            last.scatter_reduce_(0, chosen, change.last, "amax")
        picked = torch.tensor(rows, device="cpu").to(first.device, non_blocking=True)
        first, last = first.index_select(0, picked), last.index_select(0, picked)
        return Change(rows, first, last, sum(change.most for change in changes))

    def clear(self, row: int) -> None:
        """Forget a row, whose index forgets it too; memory stays where it is."""
        self.counts[row].zero_()
        self.ends[row].zero_()
        self.stops[row] = 0

    def permute(self, rows: Tensor) -> None:
        """Let row `i` be what row `rows[i]` was (int64 `[R']`)."""
        self.edges, self.counts, self.ends = (
            held.index_select(0, rows) for held in (self.edges, self.counts, self.ends)
        )
        self.stops = [self.stops[row] for row in rows.tolist()]
        # Of changes before nobody can tell any more which rows they were in.
        self._changes.clear()

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        more = rows - len(self.stops)
        self.edges = pad(self.edges, (0, 0, 0, more), value=self.cuts.first)
        self.counts, self.ends = pad(self.counts, (0, more)), pad(self.ends, (0, more))
        self.stops += [0] * more

    @property
    def nbytes(self) -> int:
        return self.edges.nbytes + self.counts.nbytes + self.ends.nbytes

    def _cut(
        self, rows: Sequence[int], starts: Sequence[int], known: Sequence[int], stops: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Cut `rows` from the last chunk that `known` tokens have decided on; `first` and `last` of the change."""
        cuts, device = self.cuts, self.edges.device
        self._reserve(cuts.most(max(stops)))
        told = torch.tensor((rows, starts, known, stops), device="cpu").to(device, non_blocking=True)
        chosen, origins, decided, ends = told.unbind()
        edges = self.edges.index_select(0, chosen)
        number = torch.arange(edges.shape[1] - 1, device=device)
        counts = self.counts.index_select(0, chosen)
        settled = ((edges[:, :-1] + cuts.longest <= decided[:, None]) & (number < counts[:, None])).sum(1)
        base = (decided - cuts.longest + 1).clamp(min=cuts.first)
        width = max(end - max(old - cuts.longest + 1, cuts.first) for old, end in zip(known, stops, strict=True))
        if width >= cuts.longest:
            follows = self._following(chosen, origins + base, width, ends - base)
            start = edges.gather(1, settled[:, None]).long() - base[:, None]
            reached = _reached(follows, start, width // cuts.shortest)
            places = settled[:, None] + reached.cumsum(1) - 1
            # What is no edge goes into a column that is cut off.
            wide = pad(edges, (0, 1))
            target = torch.where(reached, places, edges.shape[1])
            position = (base[:, None] + torch.arange(width + 1, device=device)).int()
            self.edges.index_copy_(0, chosen, wide.scatter_(1, target, position)[:, :-1])
            now = settled + reached.sum(1) - 1
        else:
            now = settled
        self.counts.index_copy_(0, chosen, now.int())
        end = self.edges.index_select(0, chosen).gather(1, now[:, None])[:, 0]
        self.ends.index_copy_(0, chosen, torch.where(now > 0, end, 0))
        return settled, torch.maximum(counts, now)

    def _following(self, rows: Tensor, first: Tensor, width: int, limits: Tensor) -> Tensor:
        """Where a chunk ends that starts i slots behind `first`, int64 `[n, width + 1]`; i: it cannot be cut yet.

        Such a window of `longest` tokens is cut behind its latest token of the strongest level among those that leave
        it long enough (LycheeCluster, section 4.3).
        """
        cuts = self.cuts
        if self.text is None:
            levels = torch.full((len(rows), width), -1, dtype=torch.int8, device=first.device)
        else:
            levels = self.text.window(rows, first, width)
        ends = levels[:, cuts.shortest - 1 :].long()
        ends = torch.where(ends > 0, ends, WEAKEST).unfold(1, cuts.longest - cuts.shortest + 1, 1)
        choices = ends.shape[2]
        backwards = torch.arange(choices - 1, -1, -1, device=levels.device)
        latest = choices - 1 - (ends * choices + backwards).amin(2) % choices
        unknown = (levels < 0).unfold(1, cuts.longest, 1).any(2)
        lengths = torch.where(unknown, cuts.longest, cuts.shortest + latest)
        place = torch.arange(width + 1, device=levels.device).expand(len(rows), -1)
        lengths = pad(lengths, (0, place.shape[1] - lengths.shape[1]))
        return torch.where(place + cuts.longest <= limits[:, None], place + lengths, place)

    def _reserve(self, chunks: int) -> None:
        """Make room for so many chunks, and for an eighth more."""
        held = self.edges.shape[1] - 1
        if chunks > held:
            self.edges = pad(self.edges, (0, chunks + max(chunks // 8, 16) - held))

    def _of_all(self) -> Change:
        # Nobody knows how many there were: as many as there is room for.
        rows, first, room = tuple(range(len(self.stops))), torch.zeros_like(self.counts), self.edges.shape[1] - 1
        return Change(rows, first.long(), first.long() + room, room)


def _reached(follows: Tensor, start: Tensor, steps: int) -> Tensor:
    """Which places bool `[n, w]` a row comes through that goes from `start` `[n, 1]` on, in at most `steps` steps.

    After round r, all places within 2**r steps are known: their followers that far away are the others.
    """
    reached = torch.zeros_like(follows).scatter_(1, start, 1)
    for _ in range(max(steps, 1).bit_length()):
        reached = reached.scatter_reduce(1, follows, reached, "amax")
        follows = follows.gather(1, follows)
    return reached.bool()
