"""Decoding steps whose lengths only the device knows, as a CUDA graph holds them: no GPU is needed to check them.

Results are compared on CPU tensors with steps whose lengths the host knows. That nothing is read on the host is seen on
tensors without content (torch's "meta" device), where operations choose as they do on CUDA.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import saccade
from forcing import sparse_below_the_budget
from host_reads import watching
from saccade.adapters.hf.cache import session_of
from saccade.adapters.hf.graph import GraphedStep, forward, row_starts
from saccade.adapters.hf.session import Session
from saccade.decode.rows import RowSlots
from saccade.decode.stats import RunStats
from saccade.errors import UnsupportedModelError
from walking import among

from . import tiny
from .tiny import LETTERS
from .ways import ON_DEVICE, on_device

CAPACITY, EVERY = 64, 3
CLUSTERS = "sinks=2,chunk_min=2,chunk_max=4,dense_layers=1,budget=20"
RESA = "resa:page=4,min_pages=2,ratio=0.1"

POLICIES = {
    **{name: tiny.spec(name, 9) for name in tiny.POLICIES},
    "lychee_decode": "lychee_decode:roles=every:2,budget=9",
    "lychee_decode, pages": "lychee_decode:roles=every:2,page=4,budget=12",
    "resa": f"{RESA},rectify=none",
    "ratio": "tidal:reselect=3,dense_layers=1,rule=ratio,ratio=0.3,sinks=2,window=3",
    "top_p": "tidal:reselect=3,dense_layers=1,rule=top_p,top_p=0.8,budget=12,sinks=2,window=3",
    "mass": "composed:scorer=page_bounds,page=4,pooling=mass,budget=12,dense_layers=1",
    "union of pages": "composed:scorer=page_bounds,page=4,rule=rank_union,sinks=3,budget=16,dense_layers=1",
    "quest, none forced": "quest:page=4,budget=4,min_pages=3,keep_last=false,dense_layers=1",
    "lychee_cluster": f"lychee_cluster:{CLUSTERS}",
    "lychee_cluster, small groups": f"lychee_cluster:{CLUSTERS},form=paper,replant=3",
    "covering": "less_is_more:reselect=3,dense_layers=1,budget=50",
}
"""Small sets, and one that covers all rows but not the capacity."""
REWRITTEN = ("tidal", "quest", "lychee_cluster")
INDEXED = ("quest", "lychee_cluster")
"""These meet all batches every time, others the padded one, whose rows are both several and one."""

BATCHES: dict[str, dict[str, Tensor]] = {
    "one": {"input_ids": tiny.prompt(23)},
    "several": {"input_ids": tiny.prompt(30, rows=3)},
    "padded": tiny.padded([30, 7, 19]),
}


class Decoding:
    """A prompt in a `StaticCache`, and greedy steps behind it: with lengths on the host, or on the device alone."""

    batches = BATCHES

    def __init__(self, model: PreTrainedModel, spec: str, batch: str, capacity: int = CAPACITY) -> None:
        self.model, self.given = model, self.batches[batch]
        self.run = saccade.sparsify(model, spec, tokenizer=LETTERS)
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.mask = self.given.get("attention_mask", torch.ones_like(self.given["input_ids"]))
        self.starts = row_starts(self.given.get("attention_mask"), self.mask.shape[0])
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.logits = [self.call(self.given["input_ids"], positions)]

    def on_host(self, steps: int) -> None:
        for _ in range(steps):
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            self.logits.append(self.call(self.next(), self.mask.sum(-1, keepdim=True) - 1))

    def on_device(self, steps: int) -> None:
        upkeep = self.run.upkeep(self.cache, self.starts)
        for _ in range(steps):
            fed = upkeep.before(self.mask.shape[1], self.next())
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            with self.run.lengths_on_device(self.starts):
                self.logits.append(forward(self.model, self.cache, fed, self.starts))

    def next(self) -> Tensor:
        return self.logits[-1].argmax(-1, keepdim=True)

    def end(self) -> tuple[Tensor, RunStats]:
        self.run.restore()
        return torch.stack(self.logits), self.run.stats()

    def call(self, tokens: Tensor, positions: Tensor) -> Tensor:
        mask = self.mask if "attention_mask" in self.given else None
        cache = self.cache
        output = self.model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        return output.logits[:, -1]


@pytest.fixture(autouse=True)
def _every_step_is_sparse() -> Any:
    # The dense shortcut is for hosts that know the length.
    with torch.no_grad(), sparse_below_the_budget():
        yield


def assert_same(got: tuple[Tensor, RunStats], expected: tuple[Tensor, RunStats]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(got[0].argmax(-1), expected[0].argmax(-1))
    assert [layer.steps for layer in got[1].layers] == [layer.steps for layer in expected[1].layers]
    for one, other in zip(got[1].layers, expected[1].layers, strict=True):
        assert one.tokens == pytest.approx(other.tokens) and one.share == pytest.approx(other.share)


@ON_DEVICE
@pytest.mark.parametrize(
    ("name", "batch"),
    [(name, batch) for name in POLICIES for batch in BATCHES if batch == "padded" or name in INDEXED],
)
def test_lengths_on_the_device_change_nothing(name: str, batch: str) -> None:
    """Neither logits nor what is counted; also when steps of either kind follow each other."""
    model, results = tiny.llama(), []
    for kinds in ("hhhhhh", "dddhhd"):
        decoding = Decoding(model, POLICIES[name], batch)
        for kind in kinds:
            (decoding.on_host if kind == "h" else decoding.on_device)(1)
        results.append(decoding.end())
    assert_same(*results)


def to_meta(decoding: Decoding) -> None:
    """Everything that a device would hold, without its content."""
    decoding.model.to("meta")
    for layer in decoding.cache.layers:
        held = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        vars(layer).update({name: value.to("meta") for name, value in held.items()})
        layer.device = torch.device("meta")
    decoding.starts = decoding.starts.to("meta")
    history = in_cache(decoding).state.history
    history._fed = history._fed.to("meta")


READING = {**POLICIES, **{f"{name}, rectified": f"{POLICIES[name]},rectify={EVERY}" for name in REWRITTEN}}


@ON_DEVICE
@pytest.mark.parametrize(
    "name", among(READING, ("streaming", "less_is_more", "quest", "top_p", "lychee_cluster", "tidal, rectified"))
)
def test_neither_a_step_nor_what_prepares_it_reads_on_the_host(name: str) -> None:
    """On tensors without content; steps of a kind do the same, to indexes that stay."""
    decoding = Decoding(tiny.fresh("llama"), READING[name], "padded")
    starts, past, passes = decoding.starts, decoding.mask.shape[1], name not in POLICIES
    to_meta(decoding)
    token = torch.zeros((3, 1), dtype=torch.int64, device="meta")
    upkeep, shapes = decoding.run.upkeep(decoding.cache, starts), dict[int, Any]()
    with decoding.run.lengths_on_device(decoding.starts):
        forward(decoding.model, decoding.cache, upkeep.before(past, token), decoding.starts)  # indexes are built
        addresses = _index_memory(decoding)
        # Two passes; else a page, and of text two chunks and more.
        for step in range(1, 2 * (EVERY + 1) if passes else 7):
            with watching():
                fed = upkeep.before(past + step, token)
            with watching() as watched:
                forward(decoding.model, decoding.cache, fed, decoding.starts)
            assert fed.shape[1] == (EVERY + 1 if passes and step % (EVERY + 1) == EVERY else 1)
            assert shapes.setdefault(fed.shape[1], watched.shapes) == watched.shapes
    assert len(shapes[1]) > 100
    assert _index_memory(decoding) == addresses
    assert bool(addresses) == (name.startswith(("quest", "resa", "lychee_cluster", "mass", "union")))
    decoding.run.restore()


def _index_memory(decoding: Decoding) -> list[int]:
    """The tensors of all indexes, which hold them as long as the test compares."""
    indexes: Any = in_cache(decoding).state.indexes
    if not isinstance(indexes, RowSlots):
        return [id(part) for index in indexes._held.values() for part in (index.lower, index.upper)]
    layers = {} if indexes.index is None else indexes.index.layers
    trees = [one.tree for one in layers.values()]
    return [id(getattr(tree, name)) for tree in trees for name in tree.__dataclass_fields__]


def in_cache(decoding: Decoding) -> Session:
    session = session_of(decoding.cache)
    assert session is not None
    return session


@pytest.mark.parametrize("upkept", [pytest.param(True, marks=ON_DEVICE), False])
def test_an_index_of_text_is_let_take_in_before_each_step(upkept: bool) -> None:
    decoding = Decoding(tiny.llama(), POLICIES["lychee_cluster"], "several")
    if upkept:
        decoding.on_device(1)
    told = pytest.raises(UnsupportedModelError, match=on_device("takes tokens in between steps"))
    with told, decoding.run.lengths_on_device(decoding.starts):
        forward(decoding.model, decoding.cache, decoding.next(), decoding.starts)
    decoding.run.restore()


@ON_DEVICE
def test_an_index_of_text_leaves_its_memory_when_rows_move() -> None:
    """What a graph has captured is no longer what the cache is decoded with; a new one begins anew."""
    decoding = Decoding(tiny.llama(), POLICIES["lychee_cluster"], "several")
    upkeep = decoding.run.upkeep(decoding.cache, decoding.starts)
    again = decoding.run.upkeep(decoding.cache, decoding.starts)
    assert (upkeep.lost, again.lost) == (False, False)
    decoding.cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert upkeep.lost
    decoding.on_device(1)
    assert upkeep.lost
    decoding.cache.reset()
    assert again.lost
    decoding.run.restore()


def test_a_host_length_step_is_seen_to_read() -> None:
    """The watch would see it: a step that asks the cache for its length fails."""
    decoding = Decoding(tiny.fresh("llama"), "dense", "one")
    to_meta(decoding)
    with watching(), pytest.raises((AssertionError, RuntimeError)):
        decoding.model(torch.zeros((1, 1), dtype=torch.int64, device="meta"), past_key_values=decoding.cache)
    decoding.run.restore()


def test_what_needs_the_host_is_refused() -> None:
    """Every reason is named in tests/decode/test_capture.py."""
    spec, starts = f"{RESA},rectify=3:verify", torch.zeros(1, dtype=torch.int32)
    told = pytest.raises(UnsupportedModelError, match="use mode overwrite; observers and recall")
    with saccade.sparsify(tiny.llama(), spec, recall=True) as run, told, run.lengths_on_device(starts):
        pass


@pytest.mark.parametrize("tokens", [torch.zeros((1, 2), dtype=torch.int64), torch.zeros((2, 1), dtype=torch.int64)])
def test_other_calls_than_promised_are_refused(tokens: Tensor) -> None:
    decoding = Decoding(tiny.llama(), "dense", "one")
    with (
        decoding.run.lengths_on_device(decoding.starts),
        pytest.raises(UnsupportedModelError, match=on_device("promised")),
    ):
        decoding.model(tokens, past_key_values=decoding.cache)
    decoding.run.restore()


def _cache(kind: str, model: PreTrainedModel, run: saccade.Run) -> Any:
    if kind == "empty":
        return StaticCache(config=model.config, max_cache_len=CAPACITY)
    made = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=CAPACITY)
    model(tiny.prompt(), past_key_values=made)
    return made


@pytest.mark.parametrize(
    ("kind", "reason"), [("empty", "StaticCache"), ("dynamic", "StaticCache"), ("cpu", on_device("CUDA device"))]
)
def test_a_graph_needs_a_filled_static_cache_on_cuda(kind: str, reason: str) -> None:
    model = tiny.llama()
    with saccade.sparsify(model, "dense") as run, pytest.raises(UnsupportedModelError, match=reason):
        GraphedStep(run, _cache(kind, model, run))


def test_row_starts() -> None:
    assert row_starts(None, 2).tolist() == [0, 0]
    assert row_starts(torch.tensor([[0, 0, 1], [1, 1, 1]]), 2).tolist() == [2, 0]
    for wrong in ([[1, 0, 1]], [[1, 1, 0]], [[0, 0, 0]], [[1, 1], [1, 1]]):
        with pytest.raises(UnsupportedModelError, match="attention_mask"):
            row_starts(torch.tensor(wrong), 1)
