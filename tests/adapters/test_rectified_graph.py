"""`GraphedStep` under rectified policies decodes what calls decode; a stand-in for CUDA graphs runs it on the CPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from forcing import sparse_below_the_budget
from replaying import standing_in
from saccade.adapters.hf.graph import GraphedStep, forward
from saccade.decode.state import DecodeState
from saccade.errors import AttachmentError, UnsupportedModelError

from . import test_static_step as static
from . import tiny
from .ways import ON_DEVICE, STATIC_RECTIFIED, on_device, paired

NEEDS_SELECTION = DecodeState.needs_selection

EVERY, CAPACITY, NEW = 3, 54, 10
"""Two passes and two steps, and ten slots more than a row of 34 comes to."""

KINDS = ("quest", "tidal", "less_is_more", "lychee_decode, pages", "streaming", "lychee_cluster", "exact_topk")
POLICIES = {"resa": static.RESA, **{name: static.POLICIES[name] for name in KINDS}}

BATCHES: dict[str, dict[str, Tensor]] = {
    "one": {"input_ids": tiny.prompt(23)},
    "three": {"input_ids": tiny.prompt(34, rows=3)},
    "padded": tiny.padded([31, 7, 18]),
}


class Decoding(static.Decoding):
    """A prompt in a `StaticCache`, then steps that are fed `tokens` int64 `[B, n]`, by calls or by graphs."""

    batches = BATCHES

    def __init__(self, spec: str, batch: str, every: int = EVERY, capacity: int = CAPACITY) -> None:
        super().__init__(tiny.fresh("llama"), f"{spec},rectify={every}", batch, capacity)
        self.tokens = torch.randint(2, 14, (len(self.mask), NEW + 20), generator=torch.Generator().manual_seed(1))
        self.fed = 0
        self.graph: GraphedStep | None = None

    def calls(self, steps: int) -> Decoding:
        self.on_host(steps)
        return self

    def replays(self, steps: int) -> Decoding:
        if self.graph is None:
            self.graph = GraphedStep(self.run, self.cache, self.given.get("attention_mask"))
        for _ in range(steps):
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            self.logits.append(self.graph.step(self.next()).clone())
        return self

    def next(self) -> Tensor:
        self.fed += 1
        return self.tokens[:, self.fed - 1 : self.fed]

    @property
    def clean(self) -> int:
        return static.in_cache(self).final.boundary

    def stored(self) -> Tensor:
        """Keys and values of all slots that are filled, padding left out: `[n]`."""
        length = int(self.cache.get_seq_length())
        seen = self.mask[:, None, :length, None].bool()
        return torch.cat([held[:, :, :length].masked_select(seen) for held in self._held()])

    def _held(self) -> list[Tensor]:
        return [held for layer in self.cache.layers for held in (layer.keys, layer.values)]


@functools.cache
def by_calls(name: str, batch: str, steps: int = NEW, capacity: int = CAPACITY) -> Decoding:
    """What replays are compared with; nobody decodes on with it."""
    return Decoding(POLICIES[name], batch, capacity=capacity).calls(steps)


@pytest.fixture(autouse=True)
def _as_captured() -> Any:
    # Calls would attend densely to what a budget covers; a graph knows no lengths.
    with torch.no_grad(), sparse_below_the_budget(), standing_in():
        yield


def assert_same(got: Decoding, expected: Decoding) -> None:
    """Logits, the whole cache, what is clean and what was counted; float32 differs in the order of sums."""
    torch.testing.assert_close(got.stored(), expected.stored(), rtol=1e-4, atol=1e-4)
    assert got.clean == expected.clean
    one, other = got.end(), expected.end()
    static.assert_same(one, other)
    assert (one[1].dense_passes, one[1].rectifications) == (other[1].dense_passes, other[1].rectifications)


@ON_DEVICE
@pytest.mark.parametrize(("name", "batch"), paired(POLICIES, BATCHES))
def test_replays_rectify_as_calls_do(name: str, batch: str) -> None:
    got = Decoding(POLICIES[name], batch).replays(NEW)
    assert_same(got, by_calls(name, batch))
    assert got.run.stats().dense_passes == NEW // (EVERY + 1)
    assert got.graph is not None and got.graph.room == CAPACITY - BATCHES[batch]["input_ids"].shape[1] - NEW


@ON_DEVICE
@pytest.mark.parametrize(
    ("name", "kinds"),
    paired(["resa", "tidal", "lychee_cluster"], ["ccrrrrcccc", "rrrccrrrcr", "rrcrccccrr"]),
)
def test_calls_in_between_count_too(name: str, kinds: str) -> None:
    """Passes fall to calls and to replays, and either goes on from what the other has left unclean."""
    got = Decoding(POLICIES[name], "padded")
    for kind in kinds:
        (got.calls if kind == "c" else got.replays)(1)
    assert_same(got, by_calls(name, "padded"))


@STATIC_RECTIFIED
@pytest.mark.parametrize("name", ["quest", "lychee_cluster"])
def test_a_turn_in_between_is_searched(name: str) -> None:
    """A call of many tokens is prompt: it takes along what is unclean, and the next replay finds its tokens."""
    decoded = []
    for way in ("calls", "replays"):
        decoding = Decoding(POLICIES[name], "three")
        getattr(decoding, way)(2)
        turn = tiny.prompt(13, rows=3, seed=5)
        decoding.mask = torch.nn.functional.pad(decoding.mask, (0, 13), value=1)
        decoding.logits.append(decoding.call(turn, torch.arange(36, 49).expand(3, -1)))
        decoded.append(getattr(decoding, way)(EVERY + 2))
    assert_same(decoded[1], decoded[0])


@ON_DEVICE
@pytest.mark.parametrize("captured", ["before", "behind"])
def test_a_call_interrupted_in_its_pass_is_made_up_for(captured: str) -> None:
    """What it has hidden is there again at once, and the pass is the next replay's."""
    got = Decoding(POLICIES["resa"], "three").replays(2 if captured == "before" else 0)
    if captured == "behind":
        got.graph = None
    got.calls(EVERY - got.fed)
    with tiny.raising(got.model.get_decoder().layers[-1], KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        got.call(got.tokens[:, EVERY : EVERY + 1], torch.full((3, 1), 34 + EVERY))
    assert {int(layer.cumulative_length) for layer in got.cache.layers} == {34 + EVERY}
    assert_same(got.replays(NEW - EVERY), by_calls("resa", "three"))


@ON_DEVICE
@pytest.mark.parametrize("fed", [2, EVERY])
@pytest.mark.parametrize("launched", [False, True])
def test_an_interrupted_replay_is_made_up_for(fed: int, launched: bool) -> None:
    """What was not launched comes again, a pass too; behind a launch the device is asked for its length."""
    got = Decoding(POLICIES["resa"], "three").replays(fed)
    graph: Any = got.graph
    count = EVERY + 1 if fed == EVERY else 1
    kept = graph._recorded[count]

    def interrupted() -> None:
        if launched:
            kept.replay()
        raise KeyboardInterrupt

    graph._recorded[count] = replace(kept, replay=interrupted)
    with pytest.raises(KeyboardInterrupt):
        graph.step(got.tokens[:, got.fed : got.fed + 1])
    graph._recorded[count] = kept
    assert got.clean == 34
    if not launched:
        assert_same(got.replays(NEW - fed), by_calls("resa", "three"))
    elif count == 1:
        got.fed += 1
        graph.step(got.tokens[:, got.fed : got.fed + 1])
        assert graph._past == int(got.cache.layers[0].cumulative_length)
    else:
        told = f"{EVERY + 1} tokens of this cache were decoded sparsely and a pass runs {EVERY}"
        with pytest.raises(UnsupportedModelError, match=told):
            graph.step(got.tokens[:, :1])


@ON_DEVICE
@pytest.mark.parametrize("length", [24, 26, 27])
def test_a_cache_may_end_before_a_pass_or_with_it(length: int) -> None:
    """Behind 23 tokens and `EVERY` sparse steps a pass needs one slot; `room` counts steps of both kinds."""
    room = length - 23
    got = Decoding(POLICIES["resa"], "one", capacity=length).replays(room)
    assert got.graph is not None and got.graph.room == 0
    with pytest.raises(UnsupportedModelError, match="full"):
        got.replays(1)
    got.mask = got.mask[:, :length]
    assert_same(got, Decoding(POLICIES["resa"], "one", capacity=length).calls(room))
    assert got.run.stats().dense_passes == int(length == 27)


@ON_DEVICE
@pytest.mark.parametrize("sparse", [0, 2, EVERY])
def test_a_pass_is_captured_where_little_room_is_left(sparse: int) -> None:
    """Its warm-ups need more slots than are free behind the cache, and leave all as it was, bounds of keys included."""
    capacity = 34 + EVERY + 1
    got = Decoding(POLICIES["resa"], "three", capacity=capacity).calls(sparse)
    before = got.stored()
    got.replays(0)
    assert torch.equal(got.stored(), before)
    assert_same(got.replays(EVERY + 1 - sparse), by_calls("resa", "three", EVERY + 1, capacity))
    assert got.run.stats().dense_passes == 1


@ON_DEVICE
def test_the_shortest_period() -> None:
    got = Decoding(POLICIES["quest"], "padded", every=1).replays(5)
    assert_same(got, Decoding(POLICIES["quest"], "padded", every=1).calls(5))


@ON_DEVICE
@pytest.mark.parametrize(("budget", "passes", "by_calls"), [(100, 0, 0), (30, 1, 0), (29, 1, 1), (25, 2, 2)])
def test_what_a_budget_covers_is_not_run_again(
    budget: int, passes: int, by_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in calls, which attend densely to it; passes are due behind 26 and 30 tokens.

    A call's own token is dense for itself where it is the first that is not covered: no graph holds that.
    """
    monkeypatch.setattr(DecodeState, "needs_selection", NEEDS_SELECTION)
    spec = f"tidal:reselect=3,dense_layers=1,budget={budget}"
    got, expected = Decoding(spec, "one").replays(NEW), Decoding(spec, "one").calls(NEW)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    if budget < CAPACITY:
        assert got.clean == expected.clean
    assert (got.end()[1].dense_passes, expected.end()[1].dense_passes) == (passes, by_calls)


@ON_DEVICE
def test_a_pass_gives_logits_of_its_own_token_alone() -> None:
    decoding, seen = Decoding(POLICIES["resa"], "three"), []
    head: Any = decoding.model.lm_head
    head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    decoding.replays(0).end()
    assert seen == [1] * 6


@ON_DEVICE
def test_an_emptied_and_a_reordered_cache_are_refused() -> None:
    for change in (lambda cache: cache.reset(), lambda cache: cache.reorder_cache(torch.tensor([1, 0, 2]))):
        decoding = Decoding(POLICIES["resa"], "three").replays(2)
        change(decoding.cache)
        with pytest.raises(AttachmentError, match="emptied, reordered"):
            decoding.replays(1)
        decoding.run.restore()


@ON_DEVICE
def test_more_unclean_tokens_than_a_pass_holds_are_refused() -> None:
    """As a policy of a longer period leaves them; an ordinary call makes them good."""
    long = Decoding(POLICIES["resa"], "one", every=9).calls(7)
    long.run.restore()
    with saccade.sparsify(long.model, f"{POLICIES['resa']},rectify={EVERY}") as run:
        step, token = GraphedStep(run, long.cache), long.next()
        with pytest.raises(UnsupportedModelError, match=rf"7 tokens .* a pass runs {EVERY} again"):
            step.step(token)
        long.model(token, past_key_values=long.cache, position_ids=torch.tensor([[30]]))
        assert run.stats().rectifications == 7
        for _ in range(EVERY + 1):
            step.step(long.next())
        assert (run.stats().dense_passes, run.stats().rectifications) == (2, 7 + EVERY)


@ON_DEVICE
def test_a_call_that_nobody_prepared_is_refused() -> None:
    decoding = Decoding(POLICIES["tidal"], "one")
    starts = torch.zeros(1, dtype=torch.int32)
    with decoding.run.lengths_on_device(starts):
        with pytest.raises(UnsupportedModelError, match=on_device("runs tokens again between steps")):
            forward(decoding.model, decoding.cache, decoding.next(), starts)
        decoding.run.upkeep(decoding.cache, starts).before(23, decoding.next())
        with pytest.raises(UnsupportedModelError, match="1 x 2 tokens; 1 for each of 1 rows was promised"):
            forward(decoding.model, decoding.cache, decoding.tokens[:, :2], starts)
    decoding.run.restore()
