"""Ledgers and sweeps: what a crash, another job or a full disk does to records, and that nothing is asked twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from learning import StoppedError, largest_file, nothing, stop_after
from one_line import lacking, refused, said
from saccade.calibrate.asking import Reading
from saccade.calibrate.ledger import Ledger
from saccade.calibrate.problems import Ask, Problem
from saccade.calibrate.sweep import KEY, Sweep
from saccade.errors import OutputError
from saccade.methods.policy import Policy

SETTINGS = {"task": "kv", "lengths": [128, 256], "rate": 0.1}
RECORDS = [{"n": number, "spec": "tidal", "right": [1, 0]} for number in range(4)]


def opened(path: Path, settings: Any = SETTINGS) -> Ledger:
    return Ledger(path, settings, ("n", "spec"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "answers.jsonl"
    with opened(where) as ledger:
        for record in RECORDS:
            ledger.add(record)
    return where


def test_records_are_there_when_a_ledger_is_opened_again(path: Path) -> None:
    content = path.read_bytes()
    with opened(path, {**SETTINGS, "lengths": (128, 256)}) as ledger:  # JSON knows no tuples
        assert list(ledger.records.values()) == RECORDS
        assert (2, "tidal") in ledger.records and not {(2, "quest"), (7, "tidal")} & set(ledger.records)
        assert ledger.records[3, "tidal"] == RECORDS[3] and path.read_bytes() == content
        ledger.add({"n": 0, "spec": "quest"})
        assert path.read_bytes().endswith(b'{"n": 0, "spec": "quest"}\n')  # in the file already
    assert path.read_bytes().startswith(content) and len(opened(path).records) == 5


@pytest.mark.parametrize(("end", "left"), [(-1, 3), (-30, 3), (12, 0)])
def test_a_line_that_was_cut_off_is_dropped_and_the_file_mended(path: Path, end: int, left: int) -> None:
    """The first line, too: that is a new ledger."""
    whole = path.read_bytes()
    path.write_bytes(whole[:end])
    with opened(path) as ledger:
        assert list(ledger.records.values()) == RECORDS[:left]
        for record in RECORDS[left:]:
            ledger.add(record)
    assert path.read_bytes() == whole


def test_a_ledger_of_other_settings_is_refused(path: Path) -> None:
    content = path.read_bytes()
    others: list[tuple[dict[str, Any], list[str]]] = [
        ({**SETTINGS, "lengths": [128, 512]}, ["lengths=[128, 256]", "[128, 512]"]),
        ({**SETTINGS, "more": 1}, ["more=None", "1"]),
        ({"task": "kv", "rate": 0.1}, ["lengths=[128, 256]", "None"]),
    ]
    lines = ((said(OutputError, opened, path, other), (str(path), *words)) for other, words in others)
    assert lacking(lines) == [] and path.read_bytes() == content


FOREIGN = {
    "no settings": b'{"n": 1}\n',
    "a list": b"[1, 2]\n",
    "a broken line": b'{"settings": {"task": "kv"}}\n{"n": \n',
    "records without a key": b'{"settings": {"task": "kv"}}\n{"right": [1]}\n',
    "not UTF-8": b'{"settings": {}}\n\xff\xfe\n',
}


def test_what_is_no_ledger_or_cannot_be_written_is_refused_and_left_alone(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.jsonl" for name in FOREIGN}
    for name, path in paths.items():
        path.write_bytes(FOREIGN[name])
    assert lacking((said(OutputError, opened, path, {"task": "kv"}), (str(path),)) for path in paths.values()) == []
    assert {name: path.read_bytes() for name, path in paths.items()} == FOREIGN
    for path in (tmp_path, tmp_path / "absent" / "answers.jsonl"):
        with refused(OutputError, "cannot be written"):
            opened(path)


def test_a_full_disk_keeps_what_was_written_and_mending_on_it_loses_nothing(path: Path) -> None:
    size = path.stat().st_size
    ledger = opened(path)
    with largest_file(size + 10):
        with refused(OutputError, "cannot be written"):
            ledger.add({"n": 9, "spec": "tidal"})
        assert (9, "tidal") not in ledger.records
        with pytest.raises(OutputError):
            ledger.close()
    assert list(opened(path).records.values()) == RECORDS
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with largest_file(len(whole) // 2):
        try:
            ledger = opened(path)
        except OutputError:
            pass  # it may say that it cannot
        else:
            ledger.close()
    assert list(opened(path).records.values()) == RECORDS[:-1]


SPECS = ["dense", "tidal:reselect=3,dense_layers=1,budget=6", "quest:page=4,dense_layers=1,budget=8"]


def made_up(seed: int) -> Problem:
    words = torch.randint(2, 64, (100,), generator=torch.Generator().manual_seed(seed)).tolist()
    asks = [Ask(tuple(words[40 + 9 * n : 43 + 9 * n]), tuple(words[44 + 9 * n : 46 + 9 * n]), (3, 9)) for n in range(3)]
    return Problem(tuple(words[:40]), tuple(asks))


PROBLEMS = [made_up(seed) for seed in range(3)]


def swept(model: Any, path: Path, advance: Callable[[str], None] = nothing, **options: Any) -> Sweep:
    with Ledger(path, SETTINGS, KEY) as ledger:
        made = Sweep(model, None, PROBLEMS, ledger, **options)
        made.run(SPECS, advance)
        return made


def test_a_sweep_that_was_interrupted_asks_nothing_twice(model: Any, tmp_path: Path) -> None:
    everything, rest = list[str](), list[str]()
    whole = swept(model, tmp_path / "whole.jsonl", everything.append)
    assert everything == SPECS * 3
    with pytest.raises(StoppedError):
        swept(model, tmp_path / "parts.jsonl", stop_after(5))
    assert len((tmp_path / "parts.jsonl").read_text().splitlines()) == 6
    parts = swept(model, tmp_path / "parts.jsonl", rest.append)
    assert rest == everything[5:]
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    for spec in SPECS:
        assert parts.outcome(spec) == whole.outcome(spec)
    rest.clear()
    swept(model, tmp_path / "parts.jsonl", rest.append)
    assert rest == []


def test_workers_find_the_same(model: Any, tmp_path: Path) -> None:
    swept(model, tmp_path / "one.jsonl")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        swept(model, tmp_path / "two.jsonl")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_outcomes_are_means_over_problems(model: Any, tmp_path: Path) -> None:
    sweep = swept(model, tmp_path / "answers.jsonl")
    outcome = sweep.outcome(SPECS[1])
    answers = [Reading(model, problem).ask(Policy.from_spec(SPECS[1])) for problem in PROBLEMS]
    assert outcome.right == tuple(tuple(one["right"]) for one in answers)
    assert outcome.count == 9 and outcome.correct == sum(sum(one["right"]) for one in answers)
    assert outcome.accuracy == outcome.correct / 9
    for layer in range(4):  # records are rounded to 5 decimals
        means = [one["recalls"][layer] for one in answers]
        if means[0][2]:
            assert outcome.recalls[layer].attention == pytest.approx(sum(one[0] for one in means) / 3, abs=5e-6)
        else:
            assert outcome.recalls[layer] == tuple(means[0]) == (None, None, 0.0)
    assert outcome.share == pytest.approx(sum(one["share"] for one in answers) / 3, abs=5e-7)
    row = json.loads(json.dumps(outcome.to_dict()))
    assert row["n"] == 9 and row["interval"][0] <= row["accuracy"] <= row["interval"][1]
    without = swept(model, tmp_path / "none.jsonl", recall=False).outcome(SPECS[1])
    assert without.recalls == () and without.right == outcome.right
    assert without.to_dict()["recall"] is None
