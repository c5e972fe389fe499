"""Page bounds wait until a page is full: what is chosen is what bounds of all tokens choose, at every step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import saccade.selection.scorers.page_bounds as scorer
from saccade.decode.indexes import Indexes
from saccade.decode.state import own_indexes
from saccade.methods.policy import Policy
from saccade.plans.plan import Plan
from saccade.selection.rules import TopK
from saccade.selection.selector import ScoredSelector, Selector
from saccade.text.history import TokenHistory
from saccade.types import KVView, ModelShape, Rows, Selection

SHAPE = ModelShape(layers=1, query_heads=6, kv_heads=2, head_dim=16)
ROOM = 300
ARMS = tuple(
    f"composed:scorer=page_bounds,dense_layers=0,{more}"
    for more in ("pooling=mass,budget=48", "rule=rank_union,budget=96")
)
SPECS = ("quest:budget=48,dense_layers=0", "resa:ratio=0.3,min_pages=2,rectify=none")


pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Cache:
    """A contiguous cache of padded rows, NaN in all slots but those that were fed."""

    def __init__(self, starts: list[int], dtype: torch.dtype) -> None:
        self.starts, self.keys = starts, torch.full((len(starts), 2, ROOM, 16), torch.nan, dtype=dtype)
        self.table = torch.arange(len(starts), dtype=torch.int32)[:, None]

    def feed(self, begin: int, end: int) -> None:
        for row, start in enumerate(self.starts):
            first = max(begin, start)
            self.keys[row, :, first:end] = torch.randn(2, end - first, 16).to(self.keys.dtype)

    def seen(self, length: int) -> KVView:
        rows = Rows.on_host(self.table, self.starts, [length - start for start in self.starts], max_len=length)
        k = self.keys.transpose(1, 2)
        return KVView(k, k, rows)


def chosen(selector: Selector, indexes: Indexes, kv: KVView, q: Tensor) -> Selection:
    return selector.select(q, kv, indexes.of(0, kv), None, 0.25)


def expect_same_sets(plan: Plan, indexes: Indexes, kv: KVView) -> None:
    """The sets of an index that has taken in nothing yet, and so takes in all."""
    assert plan.selector is not None
    q = torch.randn(kv.rows.batch, 6, 16).to(kv.k.dtype)
    waiting = chosen(plan.selector, indexes, kv, q)
    exact = chosen(plan.selector, own_indexes(plan, TokenHistory()), kv, q)
    assert torch.equal(waiting.ids, exact.ids) and torch.equal(waiting.counts, exact.counts)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each update takes in."""
    taken: list[int] = []
    update = scorer.update_page_bounds

    def counted(*args: object, count: int, **more: object) -> None:
        taken.append(count)
        update(*args, count=count, **more)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(scorer, "update_page_bounds", counted)
    return taken


@pytest.mark.parametrize("spec", [*SPECS, *ARMS])
@pytest.mark.parametrize(("dtype", "starts"), [(torch.float32, [0]), (torch.bfloat16, [3, 9, 44])])
def test_tokens_one_by_one(spec: str, dtype: torch.dtype, starts: list[int]) -> None:
    plan, cache = Policy.from_spec(spec).plan(SHAPE), Cache(starts, dtype)
    indexes = own_indexes(plan, TokenHistory())
    cache.feed(0, 229)
    # An index has room for 16 pages at first.
    for length in range(230, 290):
        indexes.begin(length - 1, length)
        cache.feed(length - 1, length)
        expect_same_sets(plan, indexes, cache.seen(length))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("first", "seed"), [(63, 0), (64, 1), (65, 2), (65, 3)])
def test_tokens_taken_back_and_fed_anew(spec: str, first: int, seed: int) -> None:
    """As cropping, drafts and rectification do: the cache is rewritten from some slot on, over pages' ends or not."""
    plan, cache = Policy.from_spec(spec).plan(SHAPE), Cache([0, 9], torch.bfloat16)
    indexes, random = own_indexes(plan, TokenHistory()), torch.Generator().manual_seed(seed)
    cache.feed(0, first)
    length = first
    for _ in range(40):
        past = length - int(torch.randint(0, 21, (), generator=random))
        past, length = max(past, 50), min(max(past, 50) + int(torch.randint(1, 24, (), generator=random)), ROOM)
        indexes.begin(past, past)
        cache.keys[:, :, past:] = torch.nan
        cache.feed(past, length)
        # A call of one token, or of several that are seen one after another.
        for end in range(length if seed % 2 else past + 1, length + 1):
            expect_same_sets(plan, indexes, cache.seen(end))


def test_full_pages_alone_are_taken_in(updates: list[int]) -> None:
    plan, cache = Policy.from_spec(SPECS[0]).plan(SHAPE), Cache([0], torch.float32)
    indexes = own_indexes(plan, TokenHistory())
    cache.feed(0, ROOM)
    for length in range(70, 129):
        indexes.of(0, cache.seen(length))
    assert updates == [70, 10, 16, 16, 16]


@pytest.mark.parametrize("why", ["device", "rule"])
def test_who_cannot_wait_does_not(why: str, updates: list[int]) -> None:
    """Lengths that only the device knows, and rules that may leave the last page out."""
    plan, cache = Policy.from_spec(SPECS[0]).plan(SHAPE), Cache([0], torch.float32)
    assert isinstance(plan.selector, ScoredSelector)
    if why == "rule":
        plan = replace(plan, selector=replace(plan.selector, rule=TopK(48, keeps_last=False)))
    indexes = own_indexes(plan, TokenHistory())
    cache.feed(0, ROOM)
    for length in range(70, 90):
        kv = cache.seen(length)
        indexes.of(0, replace(kv, rows=replace(kv.rows, bounds=None)) if why == "device" else kv)
    assert updates == [70] + [1] * 19
