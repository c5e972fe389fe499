"""Training of gates: its loss and multiplier, that a run taken up again is the same run, and full disks."""

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mixing import Naive, exact
from safetensors.torch import load_file, save_file

from adapters import tiny
from learning import ABOUT, PROBLEMS, SHORT, StoppedError, begin, largest_file, nothing, records, stop_after
from one_line import refused
from saccade.calibrate.gates import Gates
from saccade.calibrate.training import CHECKPOINT, LOG, HeadTraining, Training
from saccade.errors import OutputError, SaccadeError


def train(model: Any, folder: Path, *made: Any, advance: Any = nothing, **options: Any) -> HeadTraining:
    training = begin(model, folder, *made)
    training.run(advance, **options)
    return training


@pytest.fixture(scope="module")
def whole(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeadTraining]:
    """A short training that nothing has stopped, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(model, folder, save_every=3)


def test_the_loss_is_the_sum_over_answer_tokens_and_vocabulary(tmp_path: Path) -> None:
    """Equation 6, by the naive model; gates are what the record before says."""
    model = exact("llama", 2).requires_grad_(False)
    train(model, tmp_path, Training(target=1, steps=4, rate=0.3, every=1))
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for before, after in list(pairwise(lines))[2:]:
        problem = PROBLEMS[before["step"]]
        row, answers = list(problem.tokens), []
        for ask in problem.asks:
            row += ask.prompt
            for token in ask.answer:
                answers.append(len(row) - 1)  # whose logits say the token behind it
                row.append(token)
            row += ask.after
        past = len(problem.tokens)
        gates = torch.tensor(before["mean"], dtype=torch.float64)
        assert 0 < float(gates.min()) <= float(gates.max()) < 1
        student = Naive(model, past, gates, 0.3).logits(row)[answers]
        teacher = Naive(model, past, None, 0.3).logits(row)[answers]
        assert student.shape == (5, tiny.VOCABULARY)
        wanted = float((student - teacher).square().sum())
        # Records are rounded to 1e-6: gates err by half of that, each by 1/6 of the way from dense to sparse logits at
        # most, so that losses err by 2 · 6 · 5e-7 / gap. Logits of float32: 4e-6 of the difference, as in test_mixture.
        gap = 1 - float(gates.max())
        assert after["loss"] == pytest.approx(wanted, rel=12 * 5e-7 / gap + 1e-4)
        assert wanted > 1e-3


def test_the_multiplier_climbs_above_the_target_and_falls_below_it(tmp_path: Path) -> None:
    """Equation 7 by gradient ascent: lambda + rate · (E - target), never below 0."""
    # Sets that leave nothing out: whatever gates are, the loss is 0 but for rounding, and the multiplier alone acts.
    settings = Training(target=2, steps=25, rate=0.2, kept=1.0, every=1)
    train(tiny.fresh("llama"), tmp_path, settings)
    lines = records(tmp_path)
    rose = fell = 0
    for before, after in pairwise(lines):
        excess = sum(map(sum, before["mean"])) - 2
        wanted = max(before["multiplier"] + 0.2 * excess, 0.0)
        # Gates are recorded to 5e-7 each, six of them; a sum of six float32 numbers up to 1 errs less.
        assert after["multiplier"] == pytest.approx(wanted, abs=0.2 * 6 * 1e-6)
        assert after["multiplier"] >= 0
        rose += excess > 0.01 and after["multiplier"] > before["multiplier"]
        fell += excess < -0.01 and after["multiplier"] < before["multiplier"]
    assert rose and fell
    assert lines[0]["multiplier"] == 0 and lines[0]["loss"] is None


def test_gates_begin_open_and_stay_between_0_and_1() -> None:
    gates = Gates((2, 2))
    assert torch.equal(gates.mean(), torch.ones(2, 2, dtype=torch.float64))
    (leaf,) = gates.parameters.values()
    leaf.data.copy_(torch.tensor([[-0.5, 0.25], [1.5, 1.0]]))
    gates.project()
    assert leaf.requires_grad and leaf.tolist() == gates.mean().tolist() == [[0.0, 0.25], [1.0, 1.0]]
    drawn = gates.sample(0)
    assert torch.equal(drawn, leaf) and drawn.data_ptr() != leaf.data_ptr() and gates.expected_l0().item() == 2.25
    for output in (drawn.sum(), gates.expected_l0()):
        assert torch.equal(torch.autograd.grad(output, leaf)[0], torch.ones(2, 2))


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_run_taken_up_again_is_the_run_that_never_stopped(
    model: Any, tmp_path: Path, whole: tuple[Path, HeadTraining], stop: int
) -> None:
    """The checkpoint is of step 0, 3 and 3: records behind it are there already and are not written twice."""
    folder, first = whole
    with pytest.raises(StoppedError):
        train(model, tmp_path / "parts", save_every=3, advance=stop_after(stop))
    log = tmp_path / "parts" / LOG
    if stop != 3:
        log.write_bytes(log.read_bytes()[:-9])  # the machine went down as well: a line behind the checkpoint is cut off
    parts = begin(model, tmp_path / "parts")
    assert parts.step == 3 * (stop // 3)
    parts.run(nothing, save_every=3)
    assert log.read_bytes() == (folder / LOG).read_bytes()
    assert torch.equal(first.gates.mean(), parts.gates.mean())
    assert parts.multiplier == first.multiplier


def test_a_checkpoint_between_two_records_adds_none(model: Any, tmp_path: Path) -> None:
    settings = replace(SHORT, every=2)
    train(model, tmp_path / "whole", settings, save_every=3)
    with pytest.raises(StoppedError):
        train(model, tmp_path / "parts", settings, save_every=3, advance=stop_after(3))
    again = train(model, tmp_path / "parts", settings, save_every=3)
    lines = records(tmp_path / "whole")
    assert [line["step"] for line in lines] == [0, 1, 2, 4, 6, 8, 9]
    assert (tmp_path / "parts" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()
    assert again.trace() == {name: [line[name] for line in lines] for name in again.trace()}
    assert [*again.trace()] == ["step", "loss", "expected_l0", "multiplier"]


def test_a_finished_run_is_read_from_its_folder(model: Any, whole: tuple[Path, HeadTraining]) -> None:
    folder, first = whole
    log = (folder / LOG).read_bytes()
    again = train(model, folder, SHORT, ())  # of which nothing can be read
    assert again.step == 9 and torch.equal(again.gates.mean(), first.gates.mean())
    assert (folder / LOG).read_bytes() == log


def test_a_folder_of_another_training_or_other_texts_is_refused(model: Any, tmp_path: Path) -> None:
    """Texts depend on their seed, which is `--seed`, another one than the training's own."""
    short = replace(SHORT, steps=1)
    train(model, tmp_path, short)
    for changed, about in (({"kept": 0.5}, {}), ({"seed": 1}, {}), ({}, {"seed": 5})):
        (name,) = {**changed, **about}
        with refused(OutputError, f"{name}="):
            begin(model, tmp_path, replace(short, **changed), PROBLEMS, {**ABOUT, **about})


def test_a_full_disk_leaves_the_checkpoint_before(
    model: Any, tmp_path: Path, whole: tuple[Path, HeadTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is longer than a checkpoint, and not written here."""
    folder = tmp_path / "full"
    monkeypatch.setattr(HeadTraining, "_record", lambda self, loss: None)
    train(model, folder, save_every=3, until=3)
    with largest_file(100), refused(OutputError, CHECKPOINT):
        train(model, folder, save_every=3)
    monkeypatch.undo()
    assert sorted(path.name for path in folder.iterdir()) == sorted([CHECKPOINT, LOG])  # no half-written file
    again = begin(model, folder)
    assert again.step == 3
    again.run(nothing, save_every=3)
    assert torch.equal(again.gates.mean(), whole[1].gates.mean())


def test_a_checkpoint_that_cannot_be_read_is_one_line(
    model: Any, tmp_path: Path, whole: tuple[Path, HeadTraining]
) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / CHECKPOINT
    tensors = load_file(path)
    gates = tensors.pop("gates")
    one_lost = gates.index_fill(0, torch.tensor([1]), float("nan"))
    for changed in ({"gates": one_lost}, {"gates": gates[:, :1].clone()}, {}, None):
        save_file({**tensors, **(changed or {})}, path)
        if changed is None:
            path.write_bytes(b"cut off")
        with refused(SaccadeError, CHECKPOINT):
            begin(model, tmp_path)


def test_training_moves_gates_and_nothing_else(tmp_path: Path) -> None:
    model = tiny.fresh("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    wanting = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = tiny.prompt()
    stock = model(ids, use_cache=False).logits
    for advance in (nothing, stop_after(2)):
        try:
            made = train(model, tmp_path / str(id(advance)), advance=advance)
        except StoppedError:
            assert advance is not nothing
        else:
            assert float((made.gates.mean() - 1).abs().max()) > 0.05
        for name, parameter in model.named_parameters():
            assert parameter.grad is None and torch.equal(parameter, before[name]), name
            assert parameter.requires_grad == wanting[name], name
        assert torch.equal(model(ids, use_cache=False).logits, stock)
        assert model.config._attn_implementation == "sdpa"
