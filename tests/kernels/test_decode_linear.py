"""The product of a weight with few rows, against float64: every implementation and vector width, odd sizes, threads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_budgets import TINY, UNIT, gamma
from kernel_checks import Run, built, every_implementation, every_index, every_index_run, every_width, refused, threads
from torch import Tensor

from saccade.kernels._dispatch import Implementation
from saccade.kernels._native import library as native
from saccade.kernels.decode_linear.api import DecodeLinear
from saccade.kernels.decode_linear.native import refusal

BFLOAT16 = torch.bfloat16


def inside(values: Tensor) -> Tensor:
    """The same numbers as bfloat16, at an odd place of memory that is NaN before and behind them."""
    memory = torch.full((values.numel() + 129,), torch.nan, dtype=BFLOAT16)
    view = memory[65 : 65 + values.numel()].view(values.shape)
    return view.copy_(values)


def make(rows: int, outputs: int, inputs: int, biased: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    bias = inside(torch.randn(outputs)) if biased else None
    return inside(torch.randn(rows, inputs)), inside(torch.randn(outputs, inputs)), bias


def product(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with run.chosen() as implementation:
        return DecodeLinear(weight, bias, implementation=implementation)(x)


def expect(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """A float32 sum of in + 1 terms, whose denormal factors and results may become 0, and one rounding to bfloat16."""
    assert y.dtype == BFLOAT16 and y.shape == (*x.shape[:-1], weight.shape[0])
    rows, columns = (one.reshape(-1, one.shape[-1]).double().numpy() for one in (x, weight))
    added = 0.0 if bias is None else bias.double().numpy()
    exact = rows @ columns.T + added
    sizes = abs(rows) @ abs(columns).T + abs(added)
    flushed = TINY[BFLOAT16] * (abs(rows).sum(1, keepdims=True) + abs(columns).sum(1) + x.shape[-1])
    before = gamma(x.shape[-1] + 1) * sizes + flushed
    bounds = before + UNIT[BFLOAT16] * (abs(exact) + before) + TINY[BFLOAT16]
    assert (abs(y.reshape(exact.shape).double().numpy() - exact) <= bounds).all()


@every_index_run
@given(
    rows=st.integers(1, 8),
    outputs=st.integers(1, 11),
    inputs=st.one_of(st.integers(1, 100), st.sampled_from([127, 128, 160, 192, 577])),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_the_oracle(run: Run, rows: int, outputs: int, inputs: int, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight, bias = make(rows, outputs, inputs, biased)
    expect(product(run, x, weight, bias), x, weight, bias)


@every_implementation
def test_every_shape_of_x(implementation: Implementation) -> None:
    """Rows apart too, the last position of each row of a batch: what a head gets."""
    weight, hidden = inside(torch.randn(7, 40)), torch.randn(3, 5, 40).to(BFLOAT16)
    shapes = ((5,), (1, 1), (2, 1), (2, 4), (2, 2, 2), (0,), (3, 0))
    assert not hidden[:, -1:].is_contiguous()
    for x in (hidden[:, -1:], *(torch.randn(*shape, 40).to(BFLOAT16) for shape in shapes)):
        expect(DecodeLinear(weight, implementation=implementation)(x), x, weight, None)


@every_width
def test_a_row_does_not_depend_on_the_others(lanes: int) -> None:
    for inputs in (45, 256):
        x, weight, bias = make(8, 21, inputs)
        whole = product(Run("native", lanes), x, weight, bias)
        for rows in range(1, 9):
            assert torch.equal(product(Run("native", lanes), x[:rows], weight, bias), whole[:rows])


@every_width
def test_a_row_does_not_depend_on_the_threads(lanes: int) -> None:
    """Enough bytes that the outputs are cut, in parts that do not divide them."""
    x, weight, bias = inside(torch.randn(3, 1000)), inside(torch.randn(1031, 1000)), inside(torch.randn(1031))
    alone = product(Run("native", lanes), x, weight, bias)
    for _ in range(20):
        with threads(2):
            both = product(Run("native", lanes), x, weight, bias)
        assert torch.equal(both, alone)
    some = torch.tensor([0, 1, 63, 64, 65, 127, 128, 500, 1024, 1027, 1028, 1030])
    expect(both[:, some], x, weight[some], bias[some])


@every_index_run
def test_numbers_that_are_none(run: Run) -> None:
    for inputs in (64, 67):
        weight, x = torch.ones(7, inputs), torch.ones(1, inputs)
        x[0, 1] = 0.0
        weight[1, -1], weight[2, -1], weight[3, 0] = torch.inf, -torch.inf, torch.nan
        weight[4, 0], weight[4, -1] = torch.inf, -torch.inf
        weight[5, 1] = torch.inf  # times 0
        weight[6] = 3e38
        least = torch.tensor([0x7F81], dtype=torch.uint16).view(BFLOAT16)
        placed = inside(weight)
        got = product(run, inside(x), placed)[0].tolist()
        assert got[0] == torch.tensor(inputs - 1.0).to(BFLOAT16) and got[1] == math.inf and got[2] == -math.inf
        assert all(math.isnan(value) for value in got[3:6]) and got[6] == math.inf
        placed[0, 2:3] = least
        assert math.isnan(product(run, inside(x), placed)[0, 0])
        many = product(run, inside(x.expand(8, -1)), placed, inside(torch.tensor([1.0] * 6 + [-torch.inf])))
        assert many[:, [0, 3, 4, 5, 6]].isnan().all()
        assert (many[:, 1] == math.inf).all() and (many[:, 2] == -math.inf).all()


@every_index_run
def test_numbers_below_the_smallest_normal_one(run: Run) -> None:
    """Exact or 0: never garbage, and nothing that a normal number beside them would notice."""
    weight = torch.randn(5, 70) * 2.0**-130
    weight[:, ::7] = torch.randn(5, 10)
    x = torch.randn(4, 70)
    x[1] *= 2.0**-130
    x, weight = inside(x), inside(weight)
    expect(product(run, x, weight), x, weight, None)


@every_index_run
def test_ties_are_rounded_to_even_and_once(run: Run) -> None:
    """1 + 2^-8 lies between two numbers; a bias that decides is added before the rounding."""
    weight = torch.tensor([[1.0, 2.0**-8], [1.0 + 2.0**-7, 2.0**-8], [1.0, 2.0**-8], [1.0, 2.0**-8]])
    bias = torch.tensor([0.0, 0.0, 2.0**-20, -(2.0**-20)])
    got = product(run, inside(torch.ones(1, 2)), inside(weight), inside(bias))
    assert got.tolist() == [[1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7, 1.0]]


def test_what_does_not_fit_is_refused() -> None:
    weight, x = torch.randn(3, 16).to(BFLOAT16), torch.randn(1, 16).to(BFLOAT16)
    for wrong in (weight.float(), weight[0], weight[:0], weight[:, :0]):
        refused("weight must be", DecodeLinear, wrong)
    for bias in (torch.zeros(3), torch.zeros(4, dtype=BFLOAT16), torch.zeros(3, 1, dtype=BFLOAT16)):
        refused("bias must be", DecodeLinear, weight, bias)
    refused("unknown implementation 'cpu'", DecodeLinear, weight, implementation="cpu")
    refused("9 rows, more than 8", DecodeLinear(weight), torch.randn(3, 3, 16).to(BFLOAT16))
    for wrong in (x.float(), x[:, :15], torch.tensor(1.0, dtype=BFLOAT16)):
        refused("x must be", DecodeLinear(weight), wrong)
    # What needs a gradient would get none.
    learned = DecodeLinear(torch.nn.Parameter(weight))
    refused("gradient", learned, x)
    refused("gradient", DecodeLinear(weight), x.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(learned(x), DecodeLinear(weight)(x))


def test_what_the_library_cannot_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(16, 3).to(BFLOAT16)
    x = torch.randn(2, 16).to(BFLOAT16)
    if built:
        refused("strides", DecodeLinear, weight.T, implementation="native")
        assert refusal(weight, torch.randn(4, 2).to(BFLOAT16)[:, 0]) is not None
        expect(DecodeLinear(weight.T)(x), x, weight.T, None)
    monkeypatch.setattr(native, "library", lambda: None)
    refused("no library", DecodeLinear, weight, implementation="native")
    expect(DecodeLinear(weight.T)(x), x, weight.T, None)


@pytest.mark.parametrize("implementation", ["auto", *every_index])
def test_a_weight_that_is_written_to_or_moves(implementation: Implementation) -> None:
    weight, x = torch.randn(6, 40).to(BFLOAT16), torch.randn(2, 40).to(BFLOAT16)
    linear = DecodeLinear(weight, implementation=implementation)
    expect(linear(x), x, weight, None)
    weight.mul_(3)
    expect(linear(x), x, weight, None)
    weight.data = torch.randn(9, 33).to(BFLOAT16)
    assert linear.refusal(x) is not None
    expect(linear(x[:, :33]), x[:, :33], weight, None)
    weight.data = weight.data.float()
    refused("has changed: decode_linear: weight must be bfloat16", linear, x[:, :33])
    weight.data = weight.data.to(BFLOAT16)
    expect(linear(x[:, :33]), x[:, :33], weight, None)
