"""What a tune runs through a model: every text once, with as many questions as memory holds, and always as many."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from searching import layer_settings, make_task, probe_settings, tune_settings

from learning import StoppedError, nothing, stop_after
from saccade.calibrate.layers import LayerSearch
from saccade.calibrate.tune import Tuning
from saccade.checkpoints.versions import cache_argument
from saccade.eval import reader
from saccade.eval.sheet import Sheet
from saccade.eval.subject import Subject
from saccade.recipes import machine

POLICIES = ("streaming", "quest:page=4", "less_is_more:reselect=3,rectify=4")


@pytest.fixture(scope="module")
def task(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(folder, tmp_path_factory.mktemp("task") / "task.jsonl", texts=5, asked=2)


def settings(folder: Path, task: Path, output: Path, **changes: Any) -> Any:
    given = {"policies": POLICIES, "budgets": "32,16", **changes}
    return tune_settings(folder, output, task=str(task), **given)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """Tokens that were run behind an empty cache, row by row."""
    seen: Counter[tuple[int, ...]] = Counter()
    load = Subject.load

    def look(model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if named[cache_argument(model)].get_seq_length() == 0:
            seen.update(map(tuple, args[0].tolist()))

    def watched(subject: Subject) -> Any:
        model = load(subject)
        model.register_forward_pre_hook(look, with_kwargs=True)
        return model

    monkeypatch.setattr(Subject, "load", watched)
    return seen


def test_texts_are_prefilled_once(folder: Path, task: Path, tmp_path: Path, prompts: Counter[tuple[int, ...]]) -> None:
    """Three families with two budgets each, on five texts."""
    tuning = Tuning.check(settings(folder, task, tmp_path))
    results = tuning.run(nothing)
    assert prompts == {tuning.judged.problems[number].tokens: 1 for number in range(5)}
    specs = {json.loads(line)["spec"] for line in lines_of(tmp_path)[1:]}
    assert {row["spec"] for row in results["rows"]} | {"dense"} == specs
    assert len(specs) > 1 + len(POLICIES), "no family came to its second budget"


def lines_of(folder: Path) -> list[str]:
    return (folder / "answers.jsonl").read_text().splitlines()


def widths_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> set[int]:
    """Rows of the batches of some work."""
    widths: set[int] = set()
    right = Sheet.right
    with monkeypatch.context() as patch:
        patch.setattr(Sheet, "right", lambda *given: widths.add(given[1].shape[0]) or right(*given))
        work()
    return widths


def test_a_search_that_is_taken_up_asks_as_many_together(
    folder: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory is free by then: products of other sizes round otherwise, and answers may turn on that."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(task.read_text().splitlines(keepends=True)[:4]))

    def search(name: str) -> LayerSearch:
        return LayerSearch.check(layer_settings(folder, tmp_path / name, task=str(few), budgets="16"))

    LayerSearch.check(probe_settings(folder, tmp_path / "whole", budgets="16")).run(nothing)
    for name in ("parts", "fresh"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
    monkeypatch.setattr(reader, "free_memory", lambda _: 0)
    search("whole").run(nothing)
    with pytest.raises(StoppedError):
        search("parts").run(stop_after(2))
    monkeypatch.setattr(reader, "free_memory", lambda _: 2**40)
    assert widths_of(monkeypatch, lambda: search("parts").run(nothing)) == {1}
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")
    assert json.loads(lines_of(tmp_path / "whole")[0])["settings"]["rows"] == 1
    assert widths_of(monkeypatch, lambda: search("fresh").run(nothing)) == {2}


def test_free_memory_is_the_systems_or_the_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, memory = torch.device("cpu"), tmp_path / "meminfo"
    monkeypatch.setattr(machine, "MEMORY", memory)
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    assert machine.free_memory(cpu) is None
    memory.write_text(
        "MemTotal:       24684092 kB\nMemFree:        1000 kB\nMemAvailable:   22637420 kB\nHugePages_Total:       0\n"
    )
    assert machine.free_memory(cpu) == 22637420 * 1024
    (tmp_path / "memory.stat").write_text("anon 1000000\nfile 5000000\n")
    for limit, free in (("max", 22637420 * 1024), ("3000000", 2000000), (str(2**60), 22637420 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.free_memory(cpu) == free
