"""Trainings of gates that are drawn: losses brought to one size, and as the authors' code has it, each by hand."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate

from adapters import tiny
from claims.gates.hardkuma import HardKuma
from claims.gates.published import CODE, PublishedKuma, PublishedTraining
from claims.gates.scaled import LETTER, LOSS, MULTIPLIER, SHARE, ScaledTraining
from learning import ABOUT, PROBLEMS, SHORT, StoppedError, begin, nothing, records, stop_after
from saccade.calibrate.gates import Gates
from saccade.calibrate.mixture import Mixture
from saccade.calibrate.training import LOG, HeadTraining, Training, targets
from saccade.errors import OutputError, SaccadeError
from walking import walk

SHAPE = 3, 2
"""Of the model's gates."""
ONE_STEP = replace(SHORT, steps=1)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.fresh("llama")


def drawn(model: Any, folder: Path, scale: str = LETTER, settings: Training = SHORT, gates: Any = None) -> Any:
    if scale == CODE:
        return begin(model, folder, settings, kind=PublishedTraining, gates=PublishedKuma(SHAPE))
    return begin(model, folder, settings, kind=ScaledTraining, gates=gates or HardKuma(SHAPE), scale=scale)


def trained(*given: Any, **more: Any) -> HeadTraining:
    training = drawn(*given, **more)
    training.run(nothing)
    return training


@pytest.mark.parametrize("scale", [LETTER, MULTIPLIER, SHARE])
def test_the_constraint_is_brought_to_the_size_of_the_first_loss(model: Any, tmp_path: Path, scale: str) -> None:
    trained(model, tmp_path, scale)
    lines = records(tmp_path)
    # By hand: what climbs is the excess before the step, times the rate.
    climbed = lines[1]["loss"] if scale == MULTIPLIER else 0.0
    for before, after in pairwise(lines):
        climbed += (1 / 6 if scale == SHARE else 1.0) * SHORT.rate * (before["expected_l0"] - SHORT.target)
        climbed = max(climbed, 0.0)
        # Float32 sums of six probabilities, nine times.
        assert after["multiplier"] == pytest.approx(climbed, rel=1e-5)


def test_the_loss_is_divided_by_its_first_value(model: Any, tmp_path: Path) -> None:
    for scale in (LOSS, SHARE, LETTER):
        begun = trained(model, tmp_path / scale, scale, ONE_STEP)
        first = 1.0 if scale == LETTER else records(tmp_path / scale)[1]["loss"]
        begun.multiplier = 2.0
        assert float(begun.lagrangian(torch.tensor(3.0), torch.tensor(5.0))) == pytest.approx(3.0 / first + 10.0)
    with pytest.raises(SaccadeError, match="loss: the loss is 0 at the start and has no size"):
        drawn(model, tmp_path, LOSS).lagrangian(torch.tensor(0.0), torch.tensor(1.0))


@pytest.mark.parametrize("scale", [LOSS, MULTIPLIER, CODE])
def test_a_run_taken_up_again_is_the_run_that_never_stopped(model: Any, tmp_path: Path, scale: str) -> None:
    """By seed and step gates are drawn again; the first loss is read from the log, whatever lies between records."""
    settings = replace(SHORT, every=4)
    whole = drawn(model, tmp_path / "whole", scale, settings)
    whole.run(nothing, save_every=3)
    with pytest.raises(StoppedError):
        drawn(model, tmp_path / "parts", scale, settings).run(stop_after(5), save_every=3)
    parts = drawn(model, tmp_path / "parts", scale, settings)
    assert parts.step == 3
    parts.run(nothing, save_every=3)
    assert (tmp_path / "parts" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()
    for name, value in whole.gates.parameters.items():
        assert torch.equal(value, parts.gates.parameters[name])
    with pytest.raises(OutputError, match=rf"training\.scale='{scale}', this one has None"):
        HeadTraining(model, PROBLEMS, settings, tmp_path / "whole", ABOUT, HardKuma(SHAPE))


@walk
def test_gates_without_pressure_open_where_sparse_attention_hurts(model: Any, tmp_path: Path) -> None:
    """With a target of all heads only the loss acts, and it is 0 where all gates are 1."""
    opened = trained(model, tmp_path, settings=Training(target=6, steps=40, rate=0.1, every=40, kept=0.1))
    assert float(opened.gates.mean().mean()) > 0.6
    assert {line["multiplier"] for line in records(tmp_path)} == {0.0}


def test_direct_gates_are_divided_by_what_half_open_ones_lose(model: Any, tmp_path: Path) -> None:
    """Open ones lose nothing at the start; and a run taken up again is the run that never stopped."""

    def direct(folder: str) -> ScaledTraining:
        return drawn(model, tmp_path / folder, SHARE, gates=Gates(SHAPE))

    whole, parts = direct("whole"), direct("parts")
    whole.run(nothing)
    parts.run(nothing, until=4)
    again = direct("parts")
    assert again.step == 4
    again.run(nothing)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    mixture, problem = Mixture(model, SHORT.kept), PROBLEMS[0]
    behind, at = map(torch.tensor, targets(problem))
    text, half = mixture.read(problem.tokens), torch.full(SHAPE, 0.5)
    size = (mixture.logits(text, behind, at, half) - mixture.logits(text, behind, at, None)).square().sum()
    mixture.close()
    loss, excess = torch.tensor(3.0), torch.tensor(0.0)
    assert float(whole.lagrangian(loss, excess)) == pytest.approx(3.0 / float(size.detach()), rel=1e-5)
    assert records(tmp_path / "whole")[1]["loss"] < 1e-6 * float(size.detach())


@pytest.mark.parametrize(("alpha", "beta"), [(0.2, 3.0), (5.0, 0.1), (40.0, 30.0)])
def test_gates_are_hardkumas_whose_roles_follow_the_mean_before_stretching(alpha: float, beta: float) -> None:
    gates, logs = PublishedKuma(()), HardKuma(())
    for name, value in (("alpha", alpha), ("beta", beta)):
        gates.parameters[name].data.fill_(value)
        logs.parameters[f"log_{name}"].data.fill_(np.log(value))
    mean, error = integrate.quad(lambda u: (1 - u ** (1 / beta)) ** (1 / alpha), 0, 1, limit=500)
    # The parameters are float32; the integral says how far it may be off.
    assert float(gates.mean()) == pytest.approx(mean, rel=1e-6, abs=10 * error)
    assert float(gates.expected_l0().detach()) == pytest.approx(float(logs.expected_l0().detach()), rel=1e-5)
    u = torch.linspace(0.05, 0.95, 9)
    torch.testing.assert_close(gates.stretched(u), logs.stretched(u), rtol=1e-5, atol=1e-5)


def test_parameters_stay_where_the_code_keeps_them() -> None:
    gates = PublishedKuma((2,))
    gates.parameters["alpha"].data.copy_(torch.tensor([-3.0, 0.5]))
    gates.parameters["beta"].data.copy_(torch.tensor([0.0, 1e9]))
    gates.project()
    torch.testing.assert_close(gates.parameters["alpha"].detach(), torch.tensor([1e-6, 0.5]))
    torch.testing.assert_close(gates.parameters["beta"].detach(), torch.tensor([1e-6, 100.0]))
    assert gates.mean().isfinite().all() and bool(gates.expected_l0().isfinite())


def test_the_multiplier_grows_with_the_smoothed_excess_of_density_and_never_falls(model: Any, tmp_path: Path) -> None:
    made = drawn(model, tmp_path, CODE, replace(SHORT, steps=30))
    made.run(nothing)
    lines, wanted = records(tmp_path), SHORT.target / 6
    multiplier, smoothed = 2.0, lines[0]["expected_l0"] / 6
    for before, after in pairwise(lines):
        assert before["multiplier"] == pytest.approx(multiplier, rel=1e-6)
        smoothed = 0.9 * smoothed + 0.1 * before["expected_l0"] / 6
        multiplier *= np.exp(0.001 * max(smoothed - wanted, 0.0))
        assert after["multiplier"] >= before["multiplier"]
    assert multiplier > 2.0 and made.density == pytest.approx(smoothed, rel=1e-5)
    made.multiplier, made.density = 19.9999, 1.0
    made.climb(0.0)
    assert made.multiplier == 20.0


def test_only_a_density_above_the_wanted_one_is_paid_for(model: Any, tmp_path: Path) -> None:
    """What is paid is the smoothed density's excess; its gradient is the whole of the step's own."""
    made = drawn(model, tmp_path, CODE)
    for density, open_gates, paid in ((0.9, 3.0, True), (0.1, 1.0, False)):
        made.density, made.multiplier = density, 4.0
        excess = torch.tensor(open_gates - SHORT.target, requires_grad=True)
        whole = made.lagrangian(torch.tensor(7.0), excess)
        smoothed = 0.9 * density + 0.1 * open_gates / 6
        assert float(whole.detach()) == pytest.approx(7.0 + 4.0 * max(smoothed - SHORT.target / 6, 0.0))
        whole.backward()
        assert excess.grad is not None and float(excess.grad) == pytest.approx(4.0 / 6 if paid else 0.0)


def test_the_loss_is_the_mean_square_of_last_hidden_states_of_all_tokens(model: Any, tmp_path: Path) -> None:
    made, problem = drawn(model, tmp_path, CODE), PROBLEMS[0]
    hidden = {True: torch.randn(5, 8), False: torch.randn(5, 8)}
    mixture: Any = SimpleNamespace(
        follow=lambda text, ids, gates, **asked: SimpleNamespace(hidden_states=(None, hidden[gates is None][None]))
    )
    at = torch.tensor([1])
    difference = (hidden[False] - hidden[True]).double().numpy()
    expected = float((difference**2).sum() / (5 * 8))
    assert float(made.distance(mixture, mixture, at, at)) == pytest.approx(expected, rel=1e-5)
    # And of the model's own: what a plain pass over text and tokens gives.
    ids, own = torch.tensor(problem.asks[0].prompt + problem.asks[0].answer), Mixture(model, 0.3)
    with torch.no_grad():
        said = made._hidden(own, own.read(problem.tokens), ids, None)
        plain = model(torch.tensor([[*problem.tokens, *ids.tolist()]]), output_hidden_states=True).hidden_states[-1]
    own.close()
    torch.testing.assert_close(said, plain[0, len(problem.tokens) :], rtol=1e-4, atol=1e-5)


def test_the_learning_rate_rises_and_falls(model: Any, tmp_path: Path) -> None:
    made, found = drawn(model, tmp_path / "ten", CODE, replace(SHORT, steps=10)), list[float]()
    for made.step in range(10):
        found.append(made.rate() / SHORT.rate)
    assert found == pytest.approx([0.5, *[1.0] * 8, 0.5])
    begun = drawn(model, tmp_path / "one", CODE)
    begun.run(nothing, until=1)
    # Adam's first step is the rate, wherever there is a gradient: 1 / 1.8 of it.
    moved = (begun.gates.parameters["alpha"].detach() - 1).abs()
    assert float(moved.max()) == pytest.approx(SHORT.rate / 1.8, rel=1e-3)
