"""Where the text of many rows is cut into chunks, on the device: the same chunks for every layer that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..types import Intake
from .feed import TokenFeed
from .levels import WEAKEST


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

    def decided(self, kept: int, stop: int) -> int:
        """How many chunks there can be on which the first `stop` tokens have decided and the first `kept` had not."""
        return self.most(stop - max(kept - self.longest - self.first, 0)) + 1


class ChunkTable:
    """Chunks of R rows; a chunk is cut once `longest` tokens stand behind its start.

    So its end depends on these tokens alone: not on when it was cut, on what was taken back since, or on how the tokens
    were fed. Rows of at most `longest` tokens never move it in memory.

    Attributes:
        cuts, text: sizes, and who knows levels; without text all of it is unknown.
        edges: int32 `[R, C + 1]`, chunk i of a row has logical positions `edges[i]..edges[i + 1]`; there may be more
            chunks than are looked at.
        counts: int32 `[R]`, chunks of each row.
        ends: int32 `[R]`, where each row's last chunk ends; 0 without any.
        stops: on the host, the tokens of each row that are looked at.
    """

    def __init__(
        self, cuts: Cuts, text: TokenFeed | None, rows: int, device: torch.device, *, longest: int = 0
    ) -> None:
        self.cuts, self.text = cuts, text
        room = max(cuts.most(longest), 1)
        self.edges = torch.full((rows, room + 1), cuts.first, dtype=torch.int32, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ends = torch.zeros_like(self.counts)
        self.stops, self._cut_to = [0] * rows, [0] * rows

    def take_in(self, new: Sequence[Intake]) -> bool:
        """Look at the first `stop` tokens of each row, and cut what is not cut yet; whether that was not so already."""
        if all(self.stops[one.slot] == one.stop for one in new):
            return False
        further = [one for one in new if one.stop > self._cut_to[one.slot]]
        if further:
            self._cut(further)
        # Only now: who was interrupted cuts again.
        for one in further:
            self._cut_to[one.slot] = one.stop
        self._look([one.slot for one in new], [one.stop for one in new])
        return True

    def forget(self, row: int, kept: int) -> Tensor:
        """Only the first `kept` tokens of a row stand, and no more are looked at; how many chunks, int64 `[1]`."""
        self._cut_to[row] = min(self._cut_to[row], kept)
        return self._look([row], [min(self.stops[row], kept)])

    def counted(self, rows: Tensor, stops: Tensor) -> Tensor:
        """How many chunks int64 `[n]` the first `stops` tokens of some rows have decided on; both are int64 `[n]`."""
        edges = self.edges.index_select(0, rows)
        decided = edges[:, :-1] + self.cuts.longest <= stops[:, None]
        # Behind the last one edges repeat.
        return (decided & (edges[:, 1:] > edges[:, :-1])).sum(1)

    def permute(self, rows: Tensor) -> None:
        """Let row `i` be what row `rows[i]` was (int64 `[R']`)."""
        self.edges, self.counts, self.ends = (
            held.index_select(0, rows) for held in (self.edges, self.counts, self.ends)
        )
        self.stops, self._cut_to = ([held[row] for row in rows.tolist()] for held in (self.stops, self._cut_to))

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        more = rows - len(self.stops)
        self.edges = pad(self.edges, (0, 0, 0, more), value=self.cuts.first)
        self.counts, self.ends = pad(self.counts, (0, more)), pad(self.ends, (0, more))
        self.stops += [0] * more
        self._cut_to += [0] * more

    @property
    def nbytes(self) -> int:
        return self.edges.nbytes + self.counts.nbytes + self.ends.nbytes

    def _look(self, rows: list[int], stops: list[int]) -> Tensor:
        """Look at so many tokens of some rows; how many chunks these are, int64 `[n]`."""
        chosen, told = torch.tensor((rows, stops), device="cpu").to(self.edges.device, non_blocking=True).unbind()
        counts = self.counted(chosen, told)
        end = self.edges.index_select(0, chosen).gather(1, counts[:, None])[:, 0]
        self.counts.index_copy_(0, chosen, counts.int())
        self.ends.index_copy_(0, chosen, torch.where(counts > 0, end, 0))
        for row, stop in zip(rows, stops, strict=True):
            self.stops[row] = stop
        return counts

    def _cut(self, new: Sequence[Intake]) -> None:
        """Cut rows to their `stop`, from the last chunk that is decided on."""
        cuts, device = self.cuts, self.edges.device
        self._reserve(cuts.most(max(one.stop for one in new)))
        told = [(one.slot, one.origin, self._cut_to[one.slot], one.stop) for one in new]
        width = max(stop - max(known - cuts.longest + 1, cuts.first) for _, _, known, stop in told)
        if width < cuts.longest:
            return
        chosen, origins, known, stops = torch.tensor(told, device="cpu").to(device, non_blocking=True).unbind(1)
        settled, edges = self.counted(chosen, known), self.edges.index_select(0, chosen)
        base = (known - cuts.longest + 1).clamp(min=cuts.first)
        follows = self._following(chosen, origins + base, width, stops - base)
        start = edges.gather(1, settled[:, None]).long() - base[:, None]
        reached = _reached(follows, start, width // cuts.shortest)
        places = settled[:, None] + reached.cumsum(1) - 1
        # What is no edge goes into a column that is cut off.
        target = torch.where(reached, places, edges.shape[1])
        position = (base[:, None] + torch.arange(width + 1, device=device)).int()
        standing = torch.arange(edges.shape[1], device=device) <= settled[:, None]
        wide = pad(torch.where(standing, edges, cuts.first), (0, 1))
        self.edges.index_copy_(0, chosen, wide.scatter_(1, target, position)[:, :-1])

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
            self.edges = pad(self.edges, (0, chunks + max(chunks // 8, 16) - held), value=self.cuts.first)


def _reached(follows: Tensor, start: Tensor, steps: int) -> Tensor:
    """Which places bool `[n, w]` a row comes through that goes from `start` `[n, 1]` on, in at most `steps` steps.

    After round r, all places within 2**r steps are known: their followers that far away are the others.
    """
    reached = torch.zeros_like(follows).scatter_(1, start, 1)
    for _ in range(max(steps, 1).bit_length()):
        reached = reached.scatter_reduce(1, follows, reached, "amax")
        follows = follows.gather(1, follows)
    return reached.bool()
