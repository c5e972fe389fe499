"""Where the text of many rows is cut into chunks, on the device: the same chunks for every layer that reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..types import Intake
from .feed import TokenFeed
from .history import TokenHistory
from .levels import breaks


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
    were fed. There is room for so many `chunks` of each.

    Attributes:
        cuts, text: sizes, and who knows levels; without text all of it is unknown.
        edges: int32 `[R, C + 1]`, chunk i of a row has logical positions `edges[i]..edges[i + 1]`; there may be more
            chunks than are looked at.
        counts: int32 `[R]`, chunks of each row.
        ends: int32 `[R]`, where each row's last chunk ends; 0 without any.
        stops: on the host, the tokens of each row that are looked at.
    """

    def __init__(self, cuts: Cuts, text: TokenFeed | None, rows: int, chunks: int, device: torch.device) -> None:
        self.cuts, self.text = cuts, TokenHistory() if text is None else text
        self.edges = torch.full((rows, chunks + 1), cuts.first, dtype=torch.int32, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ends = torch.zeros_like(self.counts)
        self.stops, self._cut_to = [0] * rows, [0] * rows

    def take_in(self, new: Sequence[Intake]) -> None:
        """Look at the first `stop` tokens of each row, and cut what is not cut yet."""
        if all(self.stops[one.slot] == one.stop for one in new):
            return
        further = [one for one in new if one.stop > self._cut_to[one.slot]]
        if further:
            self._cut(further)
        # Only now: who was interrupted cuts again.
        for one in further:
            self._cut_to[one.slot] = one.stop
        told = [(one.slot, one.stop) for one in new]
        rows, stops = torch.tensor(told, device="cpu").to(self.edges.device, non_blocking=True).unbind(1)
        counts = self.counted(rows, stops)
        end = self.edges.index_select(0, rows).gather(1, counts[:, None])[:, 0]
        self.counts.index_copy_(0, rows, counts.int())
        self.ends.index_copy_(0, rows, torch.where(counts > 0, end, 0))
        for row, stop in told:
            self.stops[row] = stop

    def clear(self, row: int) -> None:
        """Let a row have no tokens."""
        self.stops[row] = self._cut_to[row] = 0
        for held in (self.counts, self.ends):
            held[row].fill_(0)

    def counted(self, rows: Tensor, stops: Tensor) -> Tensor:
        """How many chunks int64 `[n]` the first `stops` tokens of some rows have decided on; both are int64 `[n]`."""
        edges = self.edges.index_select(0, rows)
        decided = edges[:, :-1] + self.cuts.longest <= stops[:, None]
        # Behind the last one edges repeat.
        return (decided & (edges[:, 1:] > edges[:, :-1])).sum(1)

    def arrange(self, rows: Tensor, chunks: int) -> None:
        """Row `i` is what row `rows[i]` was (int64 `[R']`), empty if there was none, with room for so many chunks."""
        more = max(chunks + 1 - self.edges.shape[1], 0)
        self.edges = pad(self.edges, (0, more, 0, 1), value=self.cuts.first).index_select(0, rows)
        self.counts, self.ends = (pad(held, (0, 1)).index_select(0, rows) for held in (self.counts, self.ends))
        self.stops, self._cut_to = ([[*held, 0][row] for row in rows.tolist()] for held in (self.stops, self._cut_to))

    def _cut(self, new: Sequence[Intake]) -> None:
        """Cut rows to their `stop`, from the last chunk that is decided on."""
        cuts, device = self.cuts, self.edges.device
        # Behind it, no cut is known yet; the token in front of it may share a delimiter with its first one.
        bases = [max(self._cut_to[one.slot] - cuts.longest, cuts.first - 1, 0) for one in new]
        pairs = [*zip(new, bases, strict=True)]
        width = max(one.stop - at for one, at in pairs)
        if width < cuts.longest:
            return
        told = [(one.slot, self._cut_to[one.slot], at, one.stop) for one, at in pairs]
        chosen, known, base, stops = torch.tensor(told, device="cpu").to(device, non_blocking=True).unbind(1)
        settled, edges = self.counted(chosen, known), self.edges.index_select(0, chosen)
        spans = [(one.slot, one.origin + at, one.origin + max(at, one.stop)) for one, at in pairs]
        follows = self._following(self.text.window(spans, device), stops - base)
        start = edges.gather(1, settled[:, None]).long() - base[:, None]
        reached = _reached(follows, start, width // cuts.shortest)
        places = settled[:, None] + reached.cumsum(1) - 1
        # What is no edge goes into a column that is cut off.
        target = torch.where(reached, places, edges.shape[1])
        position = (base[:, None] + torch.arange(width + 1, device=device)).int()
        standing = torch.arange(edges.shape[1], device=device) <= settled[:, None]
        wide = pad(torch.where(standing, edges, cuts.first), (0, 1))
        self.edges.index_copy_(0, chosen, wide.scatter_(1, target, position)[:, :-1])

    def _following(self, codes: Tensor, limits: Tensor) -> Tensor:
        """Where a chunk ends that starts at place i of `codes`, int64 `[n, width + 1]`; i: it cannot be cut yet.

        Such a window of `longest` tokens is cut at its latest break of the strongest level among those that leave it
        long enough (LycheeCluster, section 4.3). What follows the window does not count.
        """
        cuts = self.cuts
        levels, own = breaks(codes)
        ends = levels[:, cuts.shortest - 1 :].unfold(1, cuts.longest - cuts.shortest + 1, 1)
        ends = torch.cat((ends[..., :-1], own[:, cuts.longest - 1 :, None]), 2).long()
        choices = ends.shape[2]
        backwards = torch.arange(choices - 1, -1, -1, device=codes.device)
        latest = choices - 1 - (ends * choices + backwards).amin(2) % choices
        unknown = (codes < 0).unfold(1, cuts.longest, 1).any(2)
        lengths = torch.where(unknown, cuts.longest, cuts.shortest + latest)
        place = torch.arange(codes.shape[1] + 1, device=codes.device).expand(len(codes), -1)
        lengths = pad(lengths, (0, place.shape[1] - lengths.shape[1]))
        return torch.where(place + cuts.longest <= limits[:, None], place + lengths, place)


def _reached(follows: Tensor, start: Tensor, steps: int) -> Tensor:
    """Which places bool `[n, w]` a row comes through that goes from `start` `[n, 1]` on, in at most `steps` steps.

    After round r, all places within 2**r steps are known: their followers that far away are the others.
    """
    reached = torch.zeros_like(follows).scatter_(1, start, 1)
    for _ in range(max(steps, 1).bit_length()):
        reached = reached.scatter_reduce(1, follows, reached, "amax")
        follows = follows.gather(1, follows)
    return reached.bool()
