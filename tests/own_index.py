"""Two methods that are not ours, whose indexes lie in slots: one never looks at text, the other at nothing else."""

NAMES = ("positive_keys", "latest_stops")
BUDGET = 48


MODULE = '''"""Which tokens are kept depends on no query: on their keys' signs, or on what delimits a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from saccade import Method
from saccade.kernels._gather import gather_tokens
from saccade.methods.options import Budget, DenseLayers, Options, RectifyField
from saccade.plans.plan import Plan, layer_roles
from saccade.selection.selector import Selector
from saccade.types import Selection

BUFFER = 8


class Scores:
    """A score of every clean token, higher is better, `[S, H, T]` in each layer."""

    def __init__(self, selector, sizes):
        self.selector, self.text, keys = selector, sizes.text, sizes.keys
        self.counts = torch.zeros(sizes.slots, dtype=torch.int32, device=keys.device)
        shape = len(sizes.layers), sizes.slots, keys.heads, sizes.longest
        # vLLM makes a model under a default dtype of its own.
        self.held = torch.zeros(shape, dtype=torch.float32, device=keys.device)
        self.numbers = {layer: number for number, layer in enumerate(sizes.layers)}
        self.placed = torch.arange(sizes.slots, device=keys.device)

    @property
    def layers(self):
        return {layer: Layer(self, number, slice(None)) for layer, number in self.numbers.items()}

    def take_in(self, new, views):
        for intake in new:
            self.counts[intake.slot].fill_(intake.stop)
            at = torch.arange(intake.kept, intake.stop, device=self.held.device)
            for layer in views.layers if len(at) else ():
                kv = views.of([intake.slot])[layer]
                held = self.held[self.numbers[layer], intake.slot]
                held[:, intake.kept : intake.stop] = self.scored(kv, intake, at)

    def scored(self, kv, intake, at):
        if not self.selector.reads_text:
            keys = gather_tokens(kv.k, kv.k_scale, kv.rows, at[None])[0]
            return ((keys > 0).sum(-1) * 10_000 + at[:, None]).T
        span = intake.slot, intake.origin + intake.kept, intake.origin + intake.stop
        levels = self.text.window([span], at.device)[0]
        return at - 1e6 * ((levels < 1) | (levels > 3))

    def place(self, slots, on_device):
        self.placed = on_device

    def grow(self, slots, longest):
        layers, held, heads, tokens = self.held.shape
        more = max(slots - held, 0), max(longest - tokens, 0)
        if any(more):
            self.held = torch.nn.functional.pad(self.held, (0, more[1], 0, 0, 0, more[0]))
            self.counts = torch.nn.functional.pad(self.counts, (0, more[0]))
            self.placed = torch.arange(max(slots, held), device=self.held.device)

    def clear(self, slot):
        self.counts[slot].fill_(0)

    def permute(self, rows):
        self.held, self.counts = self.held[:, rows], self.counts[rows]
        self.placed = torch.arange(len(rows), device=rows.device)

    @property
    def nbytes(self):
        return self.held.nbytes


@dataclass
class Layer:
    owner: Scores
    number: int
    chosen: slice

    def heads(self, start, stop):
        return Layer(self.owner, self.number, slice(start, stop))

    def search(self, q, kv):
        owner, budget, lengths = self.owner, self.owner.selector.budget, kv.rows.seq_lens[:, None, None]
        placed = owner.placed.long()
        counts, scores = owner.counts[placed][:, None, None], owner.held[self.number][placed][:, self.chosen]
        place = torch.arange(scores.shape[-1], device=q.device)
        scores = scores.masked_fill(place >= counts, -torch.inf)
        best = scores.topk(min(budget, scores.shape[-1]), dim=-1).indices
        rank = torch.arange(budget, device=q.device)
        rank, nobody = rank[: best.shape[-1]], 2**30
        room = budget - (lengths - counts)
        best = torch.where((rank < room) & (rank < counts), best, nobody)
        tail = counts + torch.arange(budget, device=q.device)
        tail = torch.where(tail < lengths, tail, nobody).expand(-1, kv.kv_heads, -1)
        ids = torch.cat((best, tail), dim=-1).sort(dim=-1).values[..., :budget]
        return Selection(torch.where(ids < nobody, ids, -1).int(), (ids < nobody).sum(-1).int())


@dataclass(frozen=True)
class Scoring(Selector):
    budget: int
    owns_index = True

    def new_slots(self, sizes):
        return Scores(self, sizes)

    def stop(self, length, clean):
        return 0 if length <= self.budget else max(clean, 0) // BUFFER * BUFFER

    def select(self, q, kv, index, scores, scale):
        return index.search(q, kv)

    def size(self, length):
        return min(length, self.budget)


class Reading(Scoring):
    reads_text = True


class ScoringOptions(Options):
    """Options of both."""

    budget: Budget = 256
    dense_layers: DenseLayers = 1
    rectify: RectifyField = None


def of(selector):
    return lambda options, shape: Plan(selector(options.budget), layer_roles(shape, options.dense_layers))


METHODS = [
    Method("positive_keys", "tokens whose keys are positive", "-", ScoringOptions, of(Scoring)),
    Method("latest_stops", "the latest delimiters", "-", ScoringOptions, of(Reading)),
]
POSITIVE, STOPS = METHODS
'''
