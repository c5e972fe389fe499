"""Top-k's kernels in Triton's interpreter, and what the compiler makes of them."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import topk_contract
import torch
from compiling import compile_kernel, expect_fit, pointers, signature_of
from kernel_checks import DEVICES, refused
from topk_contract import *  # noqa: F403 - its tests, of these implementations
from topk_contract import DEVICE_STYLES as STYLES
from topk_contract import ORDERS, make_scores

from saccade.kernels._share import Share
from saccade.kernels._triton import alone as alone_kernels
from saccade.kernels._triton import ranking
from saccade.kernels._triton.alone import Alone
from saccade.kernels._triton.row import vector_of
from saccade.kernels.topk import api
from saccade.kernels.topk import triton as kernels
from saccade.kernels.topk.api import Order, topk
from walking import in_turn

MODULE = "saccade.kernels.topk.triton"
expect_topk = partial(topk_contract.expect_topk, implementation="triton")
expect_topk_and_last = partial(topk_contract.expect_topk_and_last, implementation="triton")

SMALL = Alone(blocks=128, spread=1, deep=256, read=128)
TILES = [(0, 99, Alone(most=0)), (256, 2, Alone(most=0)), (256, 2, SMALL)]


@pytest.fixture(params=TILES)
def _small_tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows of a thousand are narrowed, in parts; lists of 33 are merged, those of 65 twice.

    Keys are not held and all rows are few; they are and more than one row is a crowd; a row's program is alone.
    """
    held, crowd, alone = request.param
    with pytest.MonkeyPatch.context() as patch:
        values = {"DIRECT": 512, "TILE": 8, "PART": 128, "FEWEST_BLOCKS": 256, "COLLECTORS": 4, "CROWD": crowd}
        values |= {"PROGRAMS": crowd, "HELD": held, "ALONE": alone, "RUN": 32, "WAYS": 2, "MERGED": 16}
        for name, value in values.items():
            patch.setattr(kernels if hasattr(kernels, name) else ranking, name, value)
        yield


# Each way to cut a row meets three styles: a usual one, one of equal scores, and a special one.
NARROWED = [
    (tiles, style, order)
    for place, tiles in enumerate(TILES)
    for at, style in enumerate(STYLES)
    for turn, order in enumerate(ORDERS)
    if (at - place) % 3 == (at // 3 - turn) % 2 == 0
]


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(("_small_tiles", "style", "order"), NARROWED, indirect=["_small_tiles"])
def test_narrowed_rows(style: str, order: Order) -> None:
    """Constant scores overflow the candidates' buffer of 512; neighbouring ones all lie in one part of the row."""
    scores = make_scores(style, (3, 1, 1537), 3)
    scores[1, :, 800:] = math.inf
    scores[2, :, 130:] = math.inf
    expect_topk(scores, [1537, 800, 130], 70, order)
    for lengths in ([255, 256, 257], [0, 1, 1536]):
        expect_topk(make_scores(style, (3, 1, 1537), 4), lengths, 70, order)


@pytest.mark.parametrize(("style", "share"), [("distinct", None), ("constant", Share(1, 40, 3)), ("neighbours", None)])
def test_rows_whose_tiles_are_known(style: str, share: Share | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the best of a row's last neighbours, nor behind them; equal scores are more than are listed."""
    for name, value in {"DIRECT": 512, "FEWEST_BLOCKS": 512, "TILED_PART": 128, "ALONE": Alone(most=0)}.items():
        monkeypatch.setattr(kernels, name, value)
    for module in (kernels, api):
        monkeypatch.setattr(module, "NEIGHBOURS", 4)
    monkeypatch.setattr(kernels, "_maxima", None)
    scores = make_scores(style, (3, 1, 1537), 3)
    tiles = torch.nn.functional.pad(scores, (0, 3), value=-math.inf).unflatten(2, (385, 4)).amax(3)
    for lengths, k, last in (([1537, 800, 130], 70, 0), ([513, 519, 1303], 40, 3)):
        known = tiles.clone()
        for row, length in enumerate(lengths):
            known[row, :, (length - last) // 4 :] = math.inf
        expect_topk_and_last(scores, lengths, k, last, share, tiles=known)


def test_no_row_at_all() -> None:
    ids, counts = topk(torch.zeros(0, 2, 9000), torch.zeros(0, dtype=torch.int32), 5, implementation="triton")
    assert ids.shape == (0, 2, 5)
    assert counts.shape == (0, 2)


@pytest.mark.usefixtures("_small_tiles")
def test_narrowed_rows_of_other_shapes() -> None:
    """Nothing to choose from, reserved entries, a view without the sinks, scores stored by position, cuts in ties."""
    for order in ORDERS:
        expect_topk(torch.full((2, 1, 1100), math.inf), [0, 1], 40, order)
    expect_topk(make_scores("distinct", (4, 1, 1100), 9), [1107, 600, 7, 3], 40, "position", reserved=7)
    scores = make_scores("distinct", (2, 2, 1105), 6)
    expect_topk(scores[:, :, 5:], [1100, 1000], 50, "position")
    for view in (scores[:, :1].expand(-1, 2, -1), scores.transpose(1, 2).contiguous().transpose(1, 2)):
        expect_topk(view, [1105, 7], 50, "position")
    tied = scores[:1, :1, :1100].mul(3.0).round()
    for k, length, order in ((1, 1100, "score"), (32, 1100, "position"), (33, 1099, "score"), (128, 1099, "position")):
        expect_topk(tied, [length], k, order)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize(("_small_tiles", "style"), in_turn(TILES, STYLES[1:4]), indirect=["_small_tiles"])
def test_the_best_and_the_last_of_a_narrowed_row(style: str) -> None:
    scores = make_scores(style, (3, 1, 1300), 8)
    expect_topk_and_last(scores, [1300, 1200, 2], 40, 3, None)
    expect_topk_and_last(scores, [1300, 1200, 2], 40, 3, Share(1, 40, 3))
    expect_topk_and_last(scores, [5200, 4797, 5], 40, 3, Share(1, 40, 30), unit=4)
    expect_topk_and_last(scores, [1300, 1200, 2], 0, 3, None)


@pytest.mark.usefixtures("_small_tiles")
def test_rows_with_padding_are_read_in_whole_vectors() -> None:
    """As `page_scores` leaves them; what lies in the padding plays no part, and what lies behind it is not read."""
    held = torch.full((2, 2, 1104), math.nan)
    padded, shifted = held[:, :, :1101], held[:, :, 3:]
    for scores, vector, orders in ((padded, 4, ORDERS), (shifted, 1, ORDERS[:1]), (padded.contiguous(), 1, ORDERS[1:])):
        scores.copy_(make_scores("distinct", (2, 2, 1101), 10))
        assert vector_of(scores) == vector
        for order in orders:
            expect_topk(scores, [1101, 7], 50, order)


def test_rows_too_wide_are_refused() -> None:
    scores, lengths = torch.zeros(1, 1, 2**21), torch.tensor([5], dtype=torch.int32)
    words = "rows of at most 2097151 scores, got 2097152"
    refused(words, topk, scores, lengths, 3, implementation="triton")


def test_whole_tiles() -> None:
    scores = make_scores("distinct", (1, 1, 40_001), 7)
    expect_topk(scores, [40_001], 300, "position")
    expect_topk(scores.round(), [39_990], 300, "score")


KINDS = {**dict.fromkeys("scores best".split(), "*fp32"), **dict.fromkeys("entries source target".split(), "*i64")}
KINDS |= dict.fromkeys("lengths sizes positions marks starts found shifts floors maxima ids counts".split(), "*i32")
KERNELS = {
    "_maxima": (4, {"BOUNDED": True, "HELD": 8192, "VECTOR": 4, "DEPTH": 16, "COLUMNS": 256}),
    "_floors": (8, {"BOUNDED": True, "HELD": 4096, "LINE": 32, "TILE": 2048}),
    "_collect": (1, {"BOUNDED": True, "HELD": 8192, "VECTOR": 4, "TILE": 512, "TILES": 0, "NEAR": 1}),
    "_select": (
        16,
        {"BOUNDED": True, "VECTOR": 4, "NARROWED": True, "TILED": False, "RANKED": True}
        | {"PART": 512, "SPLITS": 256, "HELD": 8192, "HALVINGS": 3, "LINE": 32, "TILE": 4096},
    ),
    "_search": (
        8,
        {"BOUNDED": True, "VECTOR": 4, "RANKED": True} | {"BLOCKS": 512, "HALVINGS": 3, "DEPTH": 8, "READ": 2048},
    ),
    "_sort_runs": (8, {"LAST": False, "RUN": 256, "OTHERS": 16}),
    "_merge_runs": (4, {"LAST": True, "WAYS": 4, "TILE": 128}),
}
DIVISIBLE = {"batch_stride", "group_stride", "kept", "blocks", "capacity", "run"}


@pytest.mark.parametrize(
    ("kernel", "warps", "others"),
    [
        *((kernel, warps, {}) for kernel, (warps, *_) in KERNELS.items()),
        pytest.param("_maxima", 4, {"DEPTH": 4, "COLUMNS": 1024}, id="crowd"),
        pytest.param("_select", 8, {"HELD": 4096, "TILE": 2048}, id="half"),
        pytest.param("_select", 8, {"HELD": 4096, "TILE": 2048, "TILED": True, "PART": 2048, "SPLITS": 32}, id="tiled"),
        pytest.param("_collect", 4, {"HELD": 4096, "TILE": 2048, "TILES": 2048, "NEAR": 32}, id="tiles"),
        pytest.param("_search", 8, {"BLOCKS": 4096, "DEPTH": 1}, id="many"),
    ],
)
@pytest.mark.parametrize("capability", DEVICES[:2])
def test_compiled_without_spills(kernel: str, capability: int, warps: int, others: dict[str, int]) -> None:
    module = next(one for one in (kernels, alone_kernels, ranking) if hasattr(one, kernel))
    constants = KERNELS[kernel][1]
    kinds = KINDS | ({"floors": "*fp32"} if others.get("TILES") else {})
    signature = signature_of(getattr(module, kernel), kinds)
    divisible = (*pointers(signature), *(name for name in signature if name in DIVISIBLE))
    sizes = {"capability": capability, "warps": warps}
    compiled = compile_kernel(module.__name__, kernel, signature, constants | others, divisible, **sizes)
    expect_fit(compiled, 128)  # what 16 warps leave a thread


ONES = ("groups", "kept", "last")


@pytest.mark.parametrize(("ones", "bounded"), [(ONES, False), (("last",), True)])
def test_what_is_one_is_a_constant_to_the_compiler(ones: tuple[str, ...], bounded: bool) -> None:
    """A share of all ones in a row that is held spills 16 bytes under Triton 3.9, under 3.6 nothing (docs/log.md)."""
    signature = signature_of(kernels._select, KINDS, ones)
    constants = dict.fromkeys(ones, 1) | KERNELS["_select"][1]
    constants |= {"BOUNDED": bounded, "NARROWED": False, "RANKED": False, "SPLITS": 16, "HELD": 4096, "TILE": 2048}
    assert compile_kernel(MODULE, "_select", signature, constants, (), capability=90, warps=8).spilled == 0
