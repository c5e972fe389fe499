"""Trainings of gates that are drawn, and of losses that are brought to one size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import tiny
from claims.gates.hardkuma import HardKuma
from claims.gates.scaled import LETTER, LOSS, MULTIPLIER, SHARE, ScaledTraining
from learning import ABOUT, PROBLEMS, SHORT, StoppedError, nothing, records, stop_after
from saccade.calibrate.gates import DirectGates
from saccade.calibrate.mixture import Mixture
from saccade.calibrate.training import LOG, HeadTraining, Training, targets
from saccade.errors import OutputError, SaccadeError
from walking import in_turn, walk

SHAPE = 3, 2
"""Of the model's gates."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.fresh("llama")


def training(
    model: Any, folder: Path, scale: str = LETTER, settings: Training = SHORT, seed: int = 0
) -> ScaledTraining:
    return ScaledTraining(model, PROBLEMS, settings, folder, ABOUT, HardKuma(SHAPE, seed=seed), scale)


def train(model: Any, folder: Path, *options: Any, **more: Any) -> ScaledTraining:
    made = training(model, folder, *options, **more)
    made.run(nothing)
    return made


@pytest.mark.parametrize("scale", [LETTER, LOSS, MULTIPLIER, SHARE])
def test_the_constraint_is_brought_to_the_size_of_the_first_loss(model: Any, tmp_path: Path, scale: str) -> None:
    train(model, tmp_path, scale)
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
        begun = train(model, tmp_path / scale, scale, replace(SHORT, steps=1))
        first = 1.0 if scale == LETTER else records(tmp_path / scale)[1]["loss"]
        begun.multiplier = 2.0
        assert float(begun.lagrangian(torch.tensor(3.0), torch.tensor(5.0))) == pytest.approx(3.0 / first + 10.0)


def test_a_loss_of_nothing_has_no_size(model: Any, tmp_path: Path) -> None:
    made = training(model, tmp_path, LOSS)
    with pytest.raises(SaccadeError, match="loss: the loss is 0 at the start and has no size"):
        made.lagrangian(torch.tensor(0.0), torch.tensor(1.0))


@pytest.mark.parametrize(("stop", "scale"), in_turn([1, 5], [LETTER, LOSS, MULTIPLIER]))
def test_a_run_taken_up_again_is_the_run_that_never_stopped(model: Any, tmp_path: Path, scale: str, stop: int) -> None:
    """By seed and step gates are drawn again; the first loss is read from the log, whatever lies between records."""
    settings = replace(SHORT, every=4)
    whole = training(model, tmp_path / "whole", scale, settings)
    whole.run(nothing, save_every=3)
    with pytest.raises(StoppedError):
        training(model, tmp_path / "parts", scale, settings).run(stop_after(stop), save_every=3)
    parts = training(model, tmp_path / "parts", scale, settings)
    assert parts.step == 3 * (stop // 3)
    parts.run(nothing, save_every=3)
    assert (tmp_path / "parts" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()
    for name, value in whole.gates.parameters.items():
        assert torch.equal(value, parts.gates.parameters[name])
    other = train(model, tmp_path / "other", scale, replace(settings, seed=1), seed=1)
    assert not torch.equal(other.gates.mean(), whole.gates.mean())


def test_a_training_that_pauses_with_its_callers_mixture_is_the_same(model: Any, tmp_path: Path) -> None:
    whole = train(model, tmp_path / "whole")
    parts, mixture = training(model, tmp_path / "parts"), Mixture(model, SHORT.kept)
    for until in (2, 7, 20):
        parts.run(nothing, until=until, mixture=mixture)
        assert training(model, tmp_path / "parts").step == min(until, SHORT.steps)
    mixture.close()
    parts.log.close()
    assert torch.equal(parts.gates.mean(), whole.gates.mean())
    assert (tmp_path / "parts" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()


@walk
def test_gates_without_pressure_open_where_sparse_attention_hurts(model: Any, tmp_path: Path) -> None:
    """With a target of all heads only the loss acts, and it is 0 where all gates are 1."""
    made = train(model, tmp_path, LETTER, Training(target=6, steps=40, rate=0.1, every=40, kept=0.1))
    assert float(made.gates.mean().mean()) > 0.6
    assert {line["multiplier"] for line in records(tmp_path)} == {0.0}


def test_direct_gates_do_not_go_on_in_a_folder_of_others(model: Any, tmp_path: Path) -> None:
    train(model, tmp_path)
    with pytest.raises(OutputError, match=r"training\.kind='hardkuma', this one has 'direct'") as refused:
        HeadTraining(model, PROBLEMS, SHORT, tmp_path, ABOUT, DirectGates(SHAPE))
    assert "\n" not in str(refused.value)


def test_direct_gates_are_divided_by_what_half_open_ones_lose(model: Any, tmp_path: Path) -> None:
    """Open ones lose nothing at the start; and a run taken up again is the run that never stopped."""

    def direct(folder: str) -> ScaledTraining:
        return ScaledTraining(model, PROBLEMS, SHORT, tmp_path / folder, ABOUT, DirectGates(SHAPE), SHARE)

    whole, parts = direct("whole"), direct("parts")
    whole.run(nothing)
    parts.run(nothing, until=4)
    direct("parts").run(nothing)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    mixture, problem = Mixture(model, SHORT.kept), PROBLEMS[0]
    behind, at = map(torch.tensor, targets(problem))
    text, half = mixture.read(problem.tokens), torch.full(SHAPE, 0.5)
    size = (mixture.logits(text, behind, at, half) - mixture.logits(text, behind, at, None)).square().sum()
    mixture.close()
    loss, excess = torch.tensor(3.0), torch.tensor(0.0)
    assert float(whole.lagrangian(loss, excess)) == pytest.approx(3.0 / float(size.detach()), rel=1e-5)
    assert records(tmp_path / "whole")[1]["loss"] < 1e-6 * float(size.detach())
