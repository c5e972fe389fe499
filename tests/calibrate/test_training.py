"""Training of gates: its loss and multiplier, that a run taken up again is the same run, and full disks."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mixing import Naive, exact

from adapters import tiny
from saccade.calibrate import training as training_module
from saccade.calibrate.gates import KINDS
from saccade.calibrate.mixture import Mixture
from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.training import ASCENT, CHECKPOINT, LOG, LOSS, MULTIPLIER, SCALES, SHARE, HeadTraining, Training
from saccade.errors import OutputError, SaccadeError

ABOUT = {"model": "tiny", "task": "made up", "seed": 0}
SHORT = Training("hardkuma", target=2, steps=9, rate=0.3, every=1)
CHANGES = {"kind": "direct", "target": 3, "steps": 10, "rate": 0.1, "kept": 0.5, "seed": 1, "scale": "loss"}


def made_up(seed: int, questions: int = 2) -> Problem:
    """A text of 20 tokens and questions with answers of different lengths."""
    words = torch.randint(2, 64, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    text, words = words[:20], words[20:]
    asks = []
    for number in range(questions):
        prompt, answer, words = words[: 2 + number], words[10 : 12 + number], words[20:]
        asks.append(Ask(tuple(prompt), tuple(answer), None, (7,) * number))
    return Problem(tuple(text), tuple(asks))


PROBLEMS = [made_up(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.fresh("llama")


def nothing(_: str) -> None:
    pass


def train(
    model: Any, folder: Path, settings: Training = SHORT, problems: Any = PROBLEMS, about: Any = None, **options: Any
) -> HeadTraining:
    made = HeadTraining(model, problems, settings, folder, ABOUT if about is None else about)
    made.run(options.pop("advance", nothing), **options)
    return made


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()[1:]]


def test_the_loss_is_the_sum_over_answer_tokens_and_vocabulary(tmp_path: Path) -> None:
    """Equation 6, by the naive model; gates are what the record before says, since these are not sampled."""
    model = exact("llama", 2).requires_grad_(False)
    train(model, tmp_path, Training("direct", target=1, steps=4, rate=0.3, every=1))
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
        gates = torch.tensor(before["parameters"]["gates"], dtype=torch.float64)
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
    settings = Training("direct", target=2, steps=25, rate=0.2, kept=1.0, every=1)
    train(tiny.fresh("llama"), tmp_path, settings)
    lines = records(tmp_path)
    rose = fell = 0
    for before, after in pairwise(lines):
        excess = sum(map(sum, before["parameters"]["gates"])) - 2
        wanted = max(before["multiplier"] + 0.2 * excess, 0.0)
        # Gates are recorded to 5e-7 each, six of them; a sum of six float32 numbers up to 1 errs less.
        assert after["multiplier"] == pytest.approx(wanted, abs=0.2 * 6 * 1e-6)
        assert after["multiplier"] >= 0
        rose += excess > 0.01 and after["multiplier"] > before["multiplier"]
        fell += excess < -0.01 and after["multiplier"] < before["multiplier"]
    assert rose and fell
    assert lines[0]["multiplier"] == 0 and lines[0]["loss"] is None


def test_a_multiplier_stays_at_zero_below_the_target(tmp_path: Path) -> None:
    train(tiny.fresh("llama"), tmp_path, Training("hardkuma", target=6, steps=5, rate=0.3, every=1))
    assert {line["multiplier"] for line in records(tmp_path)} == {0.0}


@pytest.mark.parametrize("scale", SCALES)
def test_the_constraint_is_brought_to_the_size_of_the_first_loss(model: Any, tmp_path: Path, scale: str) -> None:
    settings = replace(SHORT, scale=scale)
    made = train(model, tmp_path, settings)
    lines = records(tmp_path)
    start = lines[1]["loss"]
    assert made.start == lines[-1]["start"] == start > 0 and lines[0]["start"] is None
    # By hand: what climbs is the excess before the step, times the rate, times the size where it is "ascent".
    climbed = start if scale == MULTIPLIER else 0.0
    for before in lines[:-1]:
        step = {ASCENT: start, SHARE: 1 / 6}.get(scale, 1.0) * settings.rate
        climbed += step * (before["expected_l0"] - settings.target)
        climbed = max(climbed, 0.0)
    # Float32 sums of six probabilities, nine times.
    assert lines[-1]["multiplier"] == pytest.approx(climbed, rel=1e-5)
    traced = made.trace()
    assert traced["multiplier"] == [line["multiplier"] for line in lines]
    assert [*traced] == ["step", "loss", "expected_l0", "multiplier"]


def test_dividing_the_loss_and_climbing_by_its_size_are_the_same_under_adam(model: Any, tmp_path: Path) -> None:
    """All gradients differ by one factor, which Adam takes out again."""
    ends = [train(model, tmp_path / scale, replace(SHORT, scale=scale)) for scale in (LOSS, ASCENT, MULTIPLIER)]
    divided, climbing, other = (end.gates.mean() for end in ends)
    # Adam's epsilon is 1e-8 beside gradients of 1e-3 and more, and float32 rounds nine steps.
    torch.testing.assert_close(divided, climbing, rtol=0, atol=1e-4)
    assert float((divided - other).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("kind", "scale", "says"),
    [
        ("hardkuma", "root", "--scale 'root' is not valid: letter, loss, multiplier, ascent, share"),
        ("direct", "loss", "--scale loss is not valid of direct gates, whose loss begins at 0: letter"),
        ("soft", "letter", "gates 'soft' are not valid: hardkuma"),
    ],
)
def test_what_cannot_be_scaled_is_refused(kind: str, scale: str, says: str) -> None:
    with pytest.raises(SaccadeError, match=says):
        Training(kind, target=2, scale=scale)


def test_a_loss_of_nothing_has_no_size(tmp_path: Path) -> None:
    """Sets that leave nothing out: the student is the teacher, to the last bit in float64."""
    settings = replace(SHORT, kept=1.0, scale=LOSS)
    with pytest.raises(SaccadeError, match="--scale loss: the loss is 0 at the start and has no size"):
        train(exact("llama", 2).requires_grad_(False), tmp_path, settings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_makes_the_same_records(model: Any, tmp_path: Path, kind: str) -> None:
    one = train(model, tmp_path / "one", replace(SHORT, kind=kind))
    two = train(model, tmp_path / "two", replace(SHORT, kind=kind))
    assert (tmp_path / "one" / LOG).read_bytes() == (tmp_path / "two" / LOG).read_bytes()
    for name, value in one.gates.state().items():
        assert torch.equal(value, two.gates.state()[name])
    train(model, tmp_path / "other", replace(SHORT, kind=kind, seed=1))
    same = [line["loss"] for line in records(tmp_path / "one")] == [
        line["loss"] for line in records(tmp_path / "other")
    ]
    assert same == (kind == "direct")  # the one kind without chance


class StoppedError(Exception):
    """What interrupts."""


def stop_after(steps: int) -> Callable[[str], None]:
    left = [steps]

    def advance(_: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise StoppedError

    return advance


@pytest.mark.parametrize(("kind", "scale"), [*((kind, "letter") for kind in KINDS), ("hardkuma", "loss")])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_run_taken_up_again_is_the_run_that_never_stopped(
    model: Any, tmp_path: Path, kind: str, scale: str, stop: int
) -> None:
    """The checkpoint is of step 0, 3 and 3: records behind it are there already and are not written twice."""
    settings = replace(SHORT, kind=kind, scale=scale, every=1)
    whole = train(model, tmp_path / "whole", settings, save_every=3)
    with pytest.raises(StoppedError):
        train(model, tmp_path / "parts", settings, save_every=3, advance=stop_after(stop))
    log = tmp_path / "parts" / LOG
    if stop != 3:
        log.write_bytes(log.read_bytes()[:-9])  # the machine went down as well: a line behind the checkpoint is cut off
    parts = HeadTraining(model, PROBLEMS, settings, tmp_path / "parts", ABOUT)
    assert parts.step == 3 * (stop // 3)
    parts.run(nothing, save_every=3)
    assert log.read_bytes() == (tmp_path / "whole" / LOG).read_bytes()
    for name, value in whole.gates.state().items():
        assert torch.equal(value, parts.gates.state()[name])
    assert parts.multiplier == whole.multiplier


def test_a_training_that_pauses_with_its_callers_mixture_is_the_same(model: Any, tmp_path: Path) -> None:
    whole = train(model, tmp_path / "whole")
    parts, mixture = HeadTraining(model, PROBLEMS, SHORT, tmp_path / "parts", ABOUT), Mixture(model, SHORT.kept)
    for until in (2, 7, 20):
        parts.run(nothing, until=until, mixture=mixture)
        assert HeadTraining(model, PROBLEMS, SHORT, tmp_path / "parts", ABOUT).step == min(until, SHORT.steps)
    mixture.close()
    parts.log.close()
    assert torch.equal(parts.gates.mean(), whole.gates.mean())
    assert (tmp_path / "parts" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()


def test_a_checkpoint_between_two_records_adds_none(model: Any, tmp_path: Path) -> None:
    settings = replace(SHORT, every=2)
    train(model, tmp_path / "whole", settings, save_every=3)
    with pytest.raises(StoppedError):
        train(model, tmp_path / "parts", settings, save_every=3, advance=stop_after(3))
    train(model, tmp_path / "parts", settings, save_every=3)
    assert [line["step"] for line in records(tmp_path / "whole")] == [0, 2, 4, 6, 8, 9]
    assert (tmp_path / "parts" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()


class Counted(list):  # type: ignore[type-arg]  # a list of problems
    """Counts what is read."""

    read = 0

    def __getitem__(self, number: Any) -> Any:
        Counted.read += 1
        return super().__getitem__(number)


def test_a_finished_run_is_read_from_its_folder(model: Any, tmp_path: Path) -> None:
    first = train(model, tmp_path)
    log, Counted.read = (tmp_path / LOG).read_bytes(), 0
    again = train(model, tmp_path, problems=Counted(PROBLEMS))
    assert Counted.read == 0 and again.step == 9
    assert torch.equal(again.gates.mean(), first.gates.mean())
    assert (tmp_path / LOG).read_bytes() == log


@pytest.mark.parametrize(
    ("changed", "about"),
    [
        *(({name: value}, {}) for name, value in CHANGES.items()),
        # What the texts depend on: their seed is `--seed`, another one than the training's own.
        *(({}, {name: value}) for name, value in (("model", "another"), ("task", "kv"), ("seed", 5))),
    ],
    ids=str,
)
def test_a_folder_of_another_training_or_other_texts_is_refused(
    model: Any, tmp_path: Path, changed: dict[str, Any], about: dict[str, Any]
) -> None:
    train(model, tmp_path, replace(SHORT, steps=1))
    other, (name,) = replace(SHORT, **{"steps": 1, **changed}), {**changed, **about}
    with pytest.raises(OutputError, match=f"{name}=") as refused:
        HeadTraining(model, PROBLEMS, other, tmp_path, {**ABOUT, **about})
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_made_is_one_line(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written") as refused:
        HeadTraining(model, PROBLEMS, SHORT, tmp_path / "file" / "folder", ABOUT)
    assert "\n" not in str(refused.value)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `size` bytes: as on a full disk, writes fail in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("what", ["save_file", "os.replace", "limit"])
def test_a_full_disk_leaves_the_checkpoint_before(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    whole = train(model, tmp_path / "whole", save_every=3)
    folder = tmp_path / "full"

    def fill_up(step: str, done: list[str] = []) -> None:  # noqa: B006  # counts calls
        done.append(step)
        if len(done) == 4 and what != "limit":  # behind the checkpoint of step 3
            if what == "save_file":
                monkeypatch.setattr(training_module, "save_file", full)
            else:
                monkeypatch.setattr("os.replace", full)
        if len(done) == 4 and what == "limit":
            limit.__enter__()

    limit = largest_file(100)
    if what == "limit":
        # The log is longer than that already; only the checkpoint is to fail.
        monkeypatch.setattr(HeadTraining, "_record", lambda self, loss: None)
    try:
        with pytest.raises(OutputError, match=CHECKPOINT) as refused:
            train(model, folder, save_every=3, advance=fill_up)
    finally:
        if what == "limit":
            limit.__exit__(None, None, None)
    monkeypatch.undo()
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in folder.iterdir()) == sorted([CHECKPOINT, LOG])  # no half-written file
    again = HeadTraining(model, PROBLEMS, SHORT, folder, ABOUT)
    assert again.step == 3
    again.run(nothing, save_every=3)
    assert torch.equal(again.gates.mean(), whole.gates.mean())


def test_a_full_disk_under_the_log_leaves_what_was_written(model: Any, tmp_path: Path) -> None:
    whole = train(model, tmp_path / "whole", save_every=3)
    size = len((tmp_path / "whole" / LOG).read_bytes())
    with largest_file(size * 7 // 10), pytest.raises(OutputError, match=LOG) as refused:
        train(model, tmp_path / "full", save_every=3)
    assert "\n" not in str(refused.value)
    again = train(model, tmp_path / "full", save_every=3)
    assert torch.equal(again.gates.mean(), whole.gates.mean())
    assert (tmp_path / "full" / LOG).read_bytes() == (tmp_path / "whole" / LOG).read_bytes()


def test_a_checkpoint_that_cannot_be_read_is_one_line(model: Any, tmp_path: Path) -> None:
    train(model, tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(b"cut off")
    with pytest.raises(SaccadeError, match=CHECKPOINT) as refused:
        HeadTraining(model, PROBLEMS, SHORT, tmp_path, ABOUT)
    assert "\n" not in str(refused.value)


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
            assert float((made.gates.mean() - 0.5).abs().max()) > 0.05
        for name, parameter in model.named_parameters():
            assert parameter.grad is None and torch.equal(parameter, before[name]), name
            assert parameter.requires_grad == wanting[name], name
        assert torch.equal(model(ids, use_cache=False).logits, stock)
        assert model.config._attn_implementation == "sdpa"


def test_gates_without_pressure_open_where_sparse_attention_hurts(tmp_path: Path) -> None:
    """With a target of all heads only the loss acts, and it is 0 where all gates are 1."""
    settings = Training("hardkuma", target=6, steps=40, rate=0.1, every=40, kept=0.1)
    made = train(tiny.fresh("llama"), tmp_path, settings)
    assert float(made.gates.mean().mean()) > 0.6
