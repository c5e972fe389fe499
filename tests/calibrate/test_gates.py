"""Gates against their papers' equations: integrated numerically, 10^6 samples, finite differences, extreme parameters.

HardKuma: LycheeDecode, equations 3, 9-15 and 20. HardConcrete: Louizos et al. 2018, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from saccade.calibrate.gates import KINDS, DirectGates, HardConcrete, HardKuma, uniform

P, Q, T = -0.1, 1.1, 2 / 3
LOW, HIGH = -P / (Q - P), (1 - P) / (Q - P)  # z is 0 where s <= LOW, 1 where s >= HIGH
EPS = 2.0**-23  # one unit in the last place of a float32, relative
# Longest chain of float32 steps that errs relative to alpha or to beta: exp of the stored logarithm (1 unit), a product
# (1/2), ln(1 - e^x) (its exp or expm1 1 unit, times 1.44 at most through the logarithm, and the logarithm 1): 3.94.
DELTA = 4 * EPS
Z_ERROR = 4 * EPS  # absolute, of the s behind a z: the stretch rounds three times, numbers up to 1.1
TINY = 1e8 * 2.0**-126  # what float32 may flush to 0 before it multiplies by beta
QUAD = 1e-10  # what `quad` must promise; the float64 functions err far less
SIGNIFICANCE = 1e-6  # of each of the 40 checks of samples: sound code and a fair seed fail one time in 25 000
SAMPLES = 10**6
Array = Any  # of numpy, or a float


class Oracle:
    """The distribution of s for the very parameters that the gates hold as float32."""

    share: Callable[..., Array]  # P(s > x), or P(s <= x), with parameters relatively `off`, upwards for a larger s

    def bracket(self, x: Array, below: bool = False, x_error: float | None = None) -> tuple[Array, Array]:
        """The share at its least and most with parameters, x (by EPS if not given) and result rounded to float32."""
        error = EPS * x if x_error is None else x_error
        ends = self.share(np.minimum(x + error, 1), below, -DELTA), self.share(x - error, below, DELTA)
        return np.minimum(*ends) * (1 - DELTA), np.maximum(*ends) * (1 + DELTA)


class Kuma(Oracle):
    def __init__(self, gates: HardKuma) -> None:
        self.a, self.b = (np.exp(v.detach().double().numpy()) for v in (gates.log_alpha, gates.log_beta))

    def density(self, x: Array) -> Array:
        return self.a * self.b * x ** (self.a - 1) * (1 - x**self.a) ** (self.b - 1)  # equation 9

    def share(self, x: Array, below: bool = False, off: float = 0.0) -> Array:
        # Equation 11 says that s^alpha follows Beta(1, beta), which scipy evaluates without cancellation.
        distribution = stats.beta.cdf if below else stats.beta.sf
        return distribution(x ** (self.a * (1 + off)), 1, self.b * (1 - off))


class Concrete(Oracle):
    def __init__(self, gates: HardConcrete) -> None:
        self.log_a = gates.log_a.detach().double().numpy()

    def density(self, x: Array) -> Array:
        # s = sigmoid((logistic + ln a) / T), by change of variables
        return stats.logistic.pdf(T * special.logit(x) - self.log_a) * T / (x * (1 - x))

    def share(self, x: Array, below: bool = False, off: float = 0.0) -> Array:
        v = T * special.logit(x)
        # A sum of ln u, ln(1 - u) and ln a errs relative to each; for the u behind x -ln u - ln(1 - u) < 2 + |logit u|.
        off = off * (2 + 2 * abs(self.log_a) + abs(v))
        return (stats.logistic.cdf if below else stats.logistic.sf)(v - self.log_a - off)


def oracle_of(gates: Any) -> Kuma | Concrete:
    return Kuma(gates) if isinstance(gates, HardKuma) else Concrete(gates)


def integral(function: Callable[[Array], Array], low: float, high: float) -> float:
    if low == 0:  # over v = -ln x: densities may be infinite at 0
        at, function = function, lambda v: at(np.exp(-v)) * np.exp(-v) if v < 700 else 0.0
        low, high = -np.log(high), np.inf
    value, error = integrate.quad(function, low, high, epsabs=QUAD / 10, epsrel=0, limit=500)
    assert error < QUAD
    return float(value)


def p_positive(gates: Any) -> torch.Tensor:
    """P(z > 0), what equation 14 leaves."""
    return gates.survival(LOW, *gates.parameters.values())


def p_one(gates: Any) -> torch.Tensor:
    """P(z = 1), equation 15."""
    return gates.survival(HIGH, *gates.parameters.values())


def moment(oracle: Kuma | Concrete, power: int) -> float:
    """E[z^power]; P(z = 1) is 1 less what lies below, equation 15: densities may be infinite at s = 1."""
    inner = integral(lambda x: (P + (Q - P) * x) ** power * oracle.density(x), LOW, HIGH)
    return inner + 1 - integral(oracle.density, 0, LOW) - integral(oracle.density, LOW, HIGH)


GRID = (0.1, 0.5, 1.0, 2.0, 7.0, 30.0)
KUMAS = [("hardkuma", {"alpha": a, "beta": b}) for a in GRID for b in GRID]
CONCRETES = [("hardconcrete", {"log_a": v}) for v in (-8.0, -2.5, -0.3, 0.0, 1.0, 6.0)]


@pytest.mark.parametrize(("kind", "parameters"), KUMAS + CONCRETES, ids=str)
def test_probabilities_and_mean_against_integrals(kind: str, parameters: dict[str, float]) -> None:
    gates: Any = KINDS[kind]((), **parameters)
    oracle = oracle_of(gates)
    zero, inner = integral(oracle.density, 0, LOW), integral(oracle.density, LOW, HIGH)
    for value, truth, (low, high) in (
        (gates.expected_l0(), 1 - zero, oracle.bracket(LOW)),
        (p_one(gates), 1 - zero - inner, oracle.bracket(HIGH)),
    ):
        assert value.dtype == torch.float32
        assert abs(value.item() - truth) <= high - low + 2 * QUAD  # what float32 may make of the closed form; integrals
    assert gates.mean().dtype == torch.float64
    assert abs(gates.mean().item() - moment(oracle, 1)) <= 3 * QUAD  # float64 throughout; three integrals


def test_expected_l0_sums_over_gates() -> None:
    gates = HardKuma((2, 3))
    gates.load({"log_alpha": torch.linspace(-1, 1, 6).view(2, 3), "log_beta": torch.linspace(2, -2, 6).view(2, 3)})
    low, high = Kuma(gates).bracket(LOW)
    assert low.sum() * (1 - 6 * EPS) <= gates.expected_l0().item() <= high.sum() * (1 + 6 * EPS)  # six terms
    assert p_positive(gates).shape == p_one(gates).shape == gates.mean().shape == (2, 3)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("hardkuma", {"alpha": a, "beta": b}) for a, b in [(1, 1), (0.2, 0.2), (0.3, 2), (5, 0.6), (3, 30), (0.05, 0.2)]]
    + [("hardconcrete", {"log_a": v}) for v in (-4.0, -0.5, 0.0, 3.0)],
    ids=str,
)
def test_a_million_samples(kind: str, parameters: dict[str, float]) -> None:
    gates, oracle = KINDS[kind]((SAMPLES,), **parameters), oracle_of(KINDS[kind]((), **parameters))
    with torch.no_grad():
        z = gates.sample(uniform((SAMPLES,), torch.Generator().manual_seed(5))).double().numpy()
    zero, one, mean = oracle.share(LOW, below=True), oracle.share(HIGH), moment(oracle, 1)
    assert stats.binomtest(int((z == 0).sum()), SAMPLES, zero).pvalue > SIGNIFICANCE
    assert stats.binomtest(int((z == 1).sum()), SAMPLES, one).pvalue > SIGNIFICANCE
    error = np.sqrt((moment(oracle, 2) - mean**2) / SAMPLES)
    assert abs(z.mean() - mean) <= stats.norm.isf(SIGNIFICANCE / 2) * error
    inner = z[(z > 0) & (z < 1)]
    between = lambda value: (oracle.share((value - P) / (Q - P), below=True) - zero) / (1 - zero - one)  # noqa: E731 (short)
    assert len(inner) > 1000 and stats.ks_1samp(inner, between, method="asymp").pvalue > SIGNIFICANCE


STEP = 1e-4
ROUNDED = 1e3 * np.finfo(float).eps  # equation 3 as it stands loses three digits at most for the parameters below
S = {  # equation 3
    "hardkuma": lambda log_a, log_b, u: (1 - u ** (1 / np.exp(log_b))) ** (1 / np.exp(log_a)),
    "hardconcrete": lambda log_a, u: 1 / (1 + np.exp((np.log(1 - u) - np.log(u) - log_a) / T)),
}
ACTIVE = {  # a term of equation 20
    "hardkuma": lambda log_a, log_b, u: (1 - LOW ** np.exp(log_a)) ** np.exp(log_b),
    "hardconcrete": lambda log_a, u: 1 - 1 / (1 + np.exp(log_a - T * np.log(LOW / (1 - LOW)))),
}


@pytest.mark.parametrize("kind", S)
def test_gradients_against_central_differences(kind: str) -> None:
    gates, u = KINDS[kind](()), np.linspace(0.02, 0.98, 25)
    names = list(gates.parameters)
    values = np.meshgrid(*[np.log([0.3, 0.8, 1, 1.7, 4])] * len(names), u, indexing="ij")
    for name, value in zip(names, values, strict=False):
        setattr(gates, name, torch.tensor(value, dtype=torch.float64, requires_grad=True))
    drawn = gates.sample(torch.tensor(values[-1]))
    z = lambda *at: np.clip(S[kind](*at) * (Q - P) + P, 0, 1)  # noqa: E731 (short)
    np.testing.assert_allclose(drawn.detach().numpy(), z(*values), rtol=0, atol=ROUNDED)
    for output, oracle in ((drawn.sum(), z), (gates.expected_l0(), ACTIVE[kind])):
        gradients = torch.autograd.grad(output, [gates.parameters[name] for name in names])
        for i, gradient in enumerate(gradients):
            at = np.stack([oracle(*values[:i], values[i] + k * STEP, *values[i + 1 :]) for k in (-2, -1, 1, 2)])
            fine, coarse = (at[2] - at[1]) / (2 * STEP), (at[3] - at[0]) / (4 * STEP)
            # Both err by step^2: the finer by a third of what lies between them. Across a kink neither is a slope.
            allowed = abs(coarse - fine) + ROUNDED / STEP
            ended = (at == 0) | (at == 1)
            smooth = ended.all(0) | ~ended.any(0)
            assert (abs(gradient.numpy() - fine) <= allowed)[smooth].all() and smooth.mean() > 0.99 and fine.any()
            assert oracle is not z or not gradient.numpy()[ended.all(0)].any()


def finite(kind: str, logarithms: tuple[Array, ...], u: Array) -> tuple[Any, Array]:
    """Gates with these stored parameters, of the shape of `u` (float32), and z: all values and gradients are finite."""
    gates: Any = KINDS[kind](u.shape)
    gates.load({name: torch.from_numpy(v).float() for name, v in zip(gates.parameters, logarithms, strict=True)})
    drawn, leaves = gates.sample(torch.from_numpy(u)), list(gates.parameters.values())
    for output in (drawn.sum(), gates.expected_l0(), p_positive(gates).sum(), p_one(gates).sum()):
        assert all(torch.isfinite(value).all() for value in (output, *torch.autograd.grad(output, leaves)))
    return gates, drawn.detach().double().numpy()


def check(kind: str, logarithms: tuple[Array, ...], u: Array) -> None:
    """Probabilities, mean and samples against the oracle's."""
    gates, z = finite(kind, logarithms, u)
    oracle = oracle_of(gates)
    positive, one = (value.detach().double().numpy() for value in (p_positive(gates), p_one(gates)))
    for value, (low, high) in ((positive, oracle.bracket(LOW)), (one, oracle.bracket(HIGH))):
        assert ((value >= np.maximum(low - TINY, 0)) & (value <= np.minimum(high + TINY, 1))).all()
    inner = oracle.share(LOW) - oracle.share(HIGH)
    width = sum(np.subtract(*oracle.bracket(x)[::-1]) for x in (LOW, HIGH))
    assert (abs(positive - inner - one) <= width + DELTA).all()
    mean = gates.mean().numpy()
    assert ((mean >= one * (1 - DELTA) - TINY) & (mean <= one * (1 + DELTA) + inner + width + TINY)).all()
    assert (mean <= 1).all()
    assert ((z >= 0) & (z <= 1)).all()
    low, high = oracle.bracket((z - P) / (Q - P), x_error=Z_ERROR)
    above = u if kind == "hardkuma" else 1 - u.astype(np.float64)  # P(s > sample): HardKuma's s falls with u
    assert ((above >= low - TINY) | (z == 1)).all() and ((above <= high + TINY) | (z == 0)).all()


EDGES = np.array([EPS, 1e-4, 0.1, 0.5, 0.9, 1 - 1e-4, 1 - EPS], dtype=np.float32)


def test_extreme_parameters() -> None:
    exponents = np.log(10.0 ** np.linspace(-8, 8, 33))
    *kuma, u = np.meshgrid(exponents, exponents, EDGES, indexing="ij")
    check("hardkuma", tuple(kuma), u)
    finite(
        "hardkuma", tuple(88 / np.log(1e8) * value for value in kuma), u
    )  # as far as float32 holds exp of both signs
    log_a, u = np.meshgrid(np.linspace(-60, 60, 241), EDGES, indexing="ij")
    check("hardconcrete", (log_a,), u)


@settings(max_examples=50)  # the grid above has 7623 and 1687 cases
@given(st.floats(-8, 8), st.floats(-8, 8), st.floats(-60, 60), st.floats(EPS, 1 - EPS, width=32))
def test_any_parameters(alpha: float, beta: float, log_a: float, u: float) -> None:
    drawn = np.array([u], dtype=np.float32)
    check("hardkuma", (np.log([10**alpha]), np.log([10**beta])), drawn)
    check("hardconcrete", (np.array([log_a]),), drawn)


def test_uniform_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = (uniform((1000, 50), torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    for kind in (HardKuma, HardConcrete):
        gates = kind((1000, 50))
        assert torch.equal(gates.sample(first), gates.sample(again))
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.tensor([0.0, 0.5, 1 - 2**-24]))
    assert uniform((3,), torch.Generator()).tolist() == [EPS, 0.5, 1 - EPS]


@pytest.mark.parametrize("kind", KINDS)
def test_state_and_load(kind: str) -> None:
    assert KINDS[kind].kind == kind
    gates, fresh = KINDS[kind]((2, 3)), KINDS[kind]((2, 3))
    gates.load({name: torch.rand(2, 3) for name in gates.parameters})
    state, leaves = gates.state(), list(fresh.parameters.values())
    fresh.load(state)
    assert all(now is leaf and now.requires_grad for now, leaf in zip(fresh.parameters.values(), leaves, strict=True))
    assert all(torch.equal(fresh.parameters[name], gates.parameters[name]) for name in state)
    gates.load({name: value + 1 for name, value in state.items()})
    assert all(torch.equal(state[name], fresh.parameters[name]) and not state[name].requires_grad for name in state)


def test_direct_gates() -> None:
    gates = DirectGates((2, 2))
    assert torch.equal(gates.mean(), torch.ones(2, 2, dtype=torch.float64))
    gates.load({"gates": torch.tensor([[-0.5, 0.25], [1.5, 1.0]])})
    gates.project()
    leaf = gates.parameters["gates"]
    assert leaf.requires_grad and leaf.tolist() == gates.mean().tolist() == [[0.0, 0.25], [1.0, 1.0]]
    drawn = gates.sample(uniform((2, 2), torch.Generator()))
    assert torch.equal(drawn, leaf) and drawn.data_ptr() != leaf.data_ptr() and gates.expected_l0().item() == 2.25
    for output in (drawn.sum(), gates.expected_l0()):
        assert torch.equal(torch.autograd.grad(output, leaf)[0], torch.ones(2, 2))
