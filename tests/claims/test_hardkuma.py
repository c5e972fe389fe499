"""HardKuma gates against LycheeDecode's equations 3, 9-15 and 20.

Integrated numerically, finite differences, extreme parameters.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from claims.gates.hardkuma import HardKuma, uniform

P, Q = -0.1, 1.1
LOW, HIGH = -P / (Q - P), (1 - P) / (Q - P)  # z is 0 where s <= LOW, 1 where s >= HIGH
EPS = 2.0**-23  # one unit in the last place of a float32, relative
# Longest chain of float32 steps that errs relative to alpha or to beta: exp of the stored logarithm (1 unit), a product
# (1/2), ln(1 - e^x) (its exp or expm1 1 unit, times 1.44 at most through the logarithm, and the logarithm 1): 3.94.
DELTA = 4 * EPS
Z_ERROR = 4 * EPS  # absolute, of the s behind a z: the stretch rounds three times, numbers up to 1.1
TINY = 1e8 * 2.0**-126  # what float32 may flush to 0 before it multiplies by beta
QUAD = 1e-10  # what `quad` must promise; the float64 functions err far less
Array = Any  # of numpy, or a float


class Oracle:
    """The distribution of s for the very parameters that the gates hold as float32."""

    def __init__(self, gates: HardKuma) -> None:
        self.a, self.b = (np.exp(v.detach().double().numpy()) for v in gates.parameters.values())

    def density(self, x: Array) -> Array:
        return self.a * self.b * x ** (self.a - 1) * (1 - x**self.a) ** (self.b - 1)  # equation 9

    def share(self, x: Array, below: bool = False, off: float = 0.0) -> Array:
        """P(s > x), or P(s <= x), with parameters relatively `off`, upwards for a larger s."""
        # Equation 11 says that s^alpha follows Beta(1, beta), which scipy evaluates without cancellation.
        distribution = stats.beta.cdf if below else stats.beta.sf
        return distribution(x ** (self.a * (1 + off)), 1, self.b * (1 - off))

    def bracket(self, x: Array, below: bool = False, x_error: float | None = None) -> tuple[Array, Array]:
        """The share at its least and most with parameters, x (by EPS if not given) and result rounded to float32."""
        error = EPS * x if x_error is None else x_error
        ends = self.share(np.minimum(x + error, 1), below, -DELTA), self.share(x - error, below, DELTA)
        return np.minimum(*ends) * (1 - DELTA), np.maximum(*ends) * (1 + DELTA)


def made(log_alpha: Array, log_beta: Array, shape: tuple[int, ...] = ()) -> HardKuma:
    gates = HardKuma(shape)
    for parameter, value in zip(gates.parameters.values(), (log_alpha, log_beta), strict=True):
        parameter.data.copy_(torch.as_tensor(value))
    return gates


def integral(function: Callable[[Array], Array], low: float, high: float) -> float:
    if low == 0:  # over v = -ln x: densities may be infinite at 0
        at, function = function, lambda v: at(np.exp(-v)) * np.exp(-v) if v < 700 else 0.0
        low, high = -np.log(high), np.inf
    value, error = integrate.quad(function, low, high, epsabs=QUAD / 10, epsrel=0, limit=500)
    assert error < QUAD
    return float(value)


def p_positive(gates: HardKuma) -> torch.Tensor:
    """P(z > 0), what equation 14 leaves."""
    return gates.survival(LOW, *gates.parameters.values())


def p_one(gates: HardKuma) -> torch.Tensor:
    """P(z = 1), equation 15."""
    return gates.survival(HIGH, *gates.parameters.values())


@pytest.mark.parametrize(
    ("alpha", "beta"), [(0.1, 0.1), (0.1, 30.0), (0.5, 2.0), (1.0, 1.0), (7.0, 0.5), (30.0, 0.1), (30.0, 30.0)]
)
def test_probabilities_and_mean_against_integrals(alpha: float, beta: float) -> None:
    gates = made(np.log(alpha), np.log(beta))
    oracle = Oracle(gates)
    zero, inner = integral(oracle.density, 0, LOW), integral(oracle.density, LOW, HIGH)
    for value, truth, (low, high) in (
        (gates.expected_l0(), 1 - zero, oracle.bracket(LOW)),
        (p_one(gates), 1 - zero - inner, oracle.bracket(HIGH)),
    ):
        assert value.dtype == torch.float32
        assert abs(value.item() - truth) <= high - low + 2 * QUAD  # what float32 may make of the closed form; integrals
    mean = integral(lambda x: (P + (Q - P) * x) * oracle.density(x), LOW, HIGH) + 1 - zero - inner
    assert gates.mean().dtype == torch.float64
    assert abs(gates.mean().item() - mean) <= 3 * QUAD  # float64 throughout; three integrals


STEP = 1e-4
ROUNDED = 1e3 * np.finfo(float).eps  # equation 3 as it stands loses three digits at most for the parameters below


def test_gradients_against_central_differences() -> None:
    values = np.meshgrid(*[np.log([0.3, 0.8, 1, 1.7, 4])] * 2, np.linspace(0.02, 0.98, 25), indexing="ij")
    gates = HardKuma(())
    leaves = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values[:2]]
    gates.parameters = dict(zip(gates.parameters, leaves, strict=True))
    drawn = gates.stretched(torch.tensor(values[-1]))
    s = lambda log_a, log_b, u: (1 - u ** (1 / np.exp(log_b))) ** (1 / np.exp(log_a))  # noqa: E731 (equation 3)
    z = lambda *at: np.clip(s(*at) * (Q - P) + P, 0, 1)  # noqa: E731 (short)
    active = lambda log_a, log_b, u: (1 - LOW ** np.exp(log_a)) ** np.exp(log_b)  # noqa: E731 (a term of equation 20)
    np.testing.assert_allclose(drawn.detach().numpy(), z(*values), rtol=0, atol=ROUNDED)
    for output, oracle in ((drawn.sum(), z), (gates.expected_l0(), active)):
        for i, gradient in enumerate(torch.autograd.grad(output, leaves)):
            at = np.stack([oracle(*values[:i], values[i] + k * STEP, *values[i + 1 :]) for k in (-2, -1, 1, 2)])
            fine, coarse = (at[2] - at[1]) / (2 * STEP), (at[3] - at[0]) / (4 * STEP)
            # Both err by step^2: the finer by a third of what lies between them. Across a kink neither is a slope.
            allowed = abs(coarse - fine) + ROUNDED / STEP
            ended = (at == 0) | (at == 1)
            smooth = ended.all(0) | ~ended.any(0)
            assert (abs(gradient.numpy() - fine) <= allowed)[smooth].all() and smooth.mean() > 0.99 and fine.any()
            assert oracle is not z or not gradient.numpy()[ended.all(0)].any()


def finite(log_alpha: Array, log_beta: Array, u: Array) -> tuple[HardKuma, Array]:
    """Gates with these stored parameters, of the shape of `u` (float32), and z: all values and gradients are finite."""
    gates = made(log_alpha, log_beta, u.shape)
    drawn, leaves = gates.stretched(torch.from_numpy(u)), list(gates.parameters.values())
    for output in (drawn.sum(), gates.expected_l0(), p_positive(gates).sum(), p_one(gates).sum()):
        assert all(torch.isfinite(value).all() for value in (output, *torch.autograd.grad(output, leaves)))
    return gates, drawn.detach().double().numpy()


def check(log_alpha: Array, log_beta: Array, u: Array) -> None:
    gates, z = finite(log_alpha, log_beta, u)
    oracle = Oracle(gates)
    positive, one = (value.detach().double().numpy() for value in (p_positive(gates), p_one(gates)))
    assert gates.expected_l0().item() == pytest.approx(positive.sum(), rel=1e-4)
    for value, (low, high) in ((positive, oracle.bracket(LOW)), (one, oracle.bracket(HIGH))):
        assert ((value >= np.maximum(low - TINY, 0)) & (value <= np.minimum(high + TINY, 1))).all()
    inner = oracle.share(LOW) - oracle.share(HIGH)
    width = sum(np.subtract(*oracle.bracket(x)[::-1]) for x in (LOW, HIGH))
    assert (abs(positive - inner - one) <= width + DELTA).all()
    mean = gates.mean().numpy()
    assert ((mean >= one * (1 - DELTA) - TINY) & (mean <= one * (1 + DELTA) + inner + width + TINY)).all()
    assert (mean <= 1).all() and ((z >= 0) & (z <= 1)).all()
    low, high = oracle.bracket((z - P) / (Q - P), x_error=Z_ERROR)
    # P(s > sample) is u: s falls with it.
    assert ((u >= low - TINY) | (z == 1)).all() and ((u <= high + TINY) | (z == 0)).all()


EDGES = np.array([EPS, 1e-4, 0.1, 0.5, 0.9, 1 - 1e-4, 1 - EPS], dtype=np.float32)


def test_extreme_parameters() -> None:
    exponents = np.log(10.0 ** np.linspace(-8, 8, 33))
    *kuma, u = np.meshgrid(exponents, exponents, EDGES, indexing="ij")
    check(*kuma, u)
    finite(*(88 / np.log(1e8) * value for value in kuma), u)  # as far as float32 holds exp of both signs


def test_a_step_has_one_sample_of_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = (HardKuma((1000, 50), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.sample(7), again.sample(7))
    assert not torch.equal(first.sample(7), other.sample(7)) and not torch.equal(first.sample(7), first.sample(8))
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.tensor([0.0, 0.5, 1 - 2**-24]))
    assert uniform((3,), torch.Generator()).tolist() == [EPS, 0.5, 1 - EPS]
    gates = HardKuma((3,))
    assert torch.equal(gates.sample(0), gates.stretched(torch.tensor([EPS, 0.5, 1 - EPS])))
