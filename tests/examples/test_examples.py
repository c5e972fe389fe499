"""Each example runs as a user runs it, in a process and a folder of its own, and gives what it promises.

`serve.py` needs vLLM and is run by `tests/serving/test_server.py`, `cuda_graph.py` on a device by `tests/gpu`,
`lm_eval.sh` by `tests/harness`.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import nbclient
import nbformat
import pytest

import saccade
from walking import walk

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 60
PROGRAMS = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb", ".sh"))
NO_DEVICE = 3
"""Exit status of `cuda_graph.py` where there is no CUDA device; `examples/README.md` says so."""


def run(name: str, folder: Path, *arguments: str) -> str:
    """What an example prints, started in a folder that is empty."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def share(text: str) -> float:
    """Of the cache attended, as the last line of a text says it."""
    found = re.findall(r"(\d+)% of the cache", text)
    return int(found[-1]) / 100


def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat is untyped


def lines_of(path: Path) -> int:
    if path.suffix == ".ipynb":
        return sum(len(cell.source.splitlines()) for cell in notebook(path).cells if cell.cell_type == "code")
    return len(path.read_text(encoding="utf-8").splitlines())


def test_examples_are_short() -> None:
    assert {name: lines for name in PROGRAMS if (lines := lines_of(EXAMPLES / name)) > MAX_LINES} == {}


def test_the_table_lists_every_example() -> None:
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \| (.+?) \| `(.+?)` \|$", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(file for file, *_ in rows) == PROGRAMS
    for file, link, _, command in rows:
        assert link == file and f"examples/{file}" in command


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has loaded torch; in one of its own `make walk` runs the others."""
    runpy.run_path(str(EXAMPLES / "generate.py"))
    printed = capsys.readouterr().out
    assert len(re.findall(r"^(?:dense|sparse): ' 4821\.", printed, re.M)) == 2, printed
    assert 0 < share(printed) < 0.6
    assert "with a budget above the context the text is the same: True" in printed


@walk
def test_chat(tmp_path: Path) -> None:
    """Three turns are answered right, and a turn reads its own question and the token that was said last."""
    printed = run("chat.py", tmp_path)
    turns = re.findall(r"^(\d+) tokens kept, (\d+) read: (\d+)\.$", printed, re.M)
    kept, read, said = ([int(number) for number in column] for column in zip(*turns, strict=True))
    assert said == [4821, 1573, 6308]
    assert kept[0] == 0 and read[0] > 1_000 and max(read[1:]) < 40
    assert all(later >= before + new for before, new, later in zip(kept, read, kept[1:], strict=False))
    assert share(printed) < 0.7


@walk
def test_own_method(tmp_path: Path) -> None:
    """It runs beside ours and chooses otherwise; with a budget above the context it misses nothing."""
    found = re.findall(r"^(\w+):.*: ' 4821\..*', attention recall (\d\.\d\d)$", run("own_method.py", tmp_path), re.M)
    assert [name for name, _ in found] == ["tidal", "neighbours", "neighbours"]
    ours, theirs, covering = (float(recall) for _, recall in found)
    assert theirs != ours and 0 < theirs < covering == 1


@walk
def test_recall(tmp_path: Path) -> None:
    """The picture is drawn; exact scores catch most."""
    found = dict(re.findall(r"^(\w+):.*: recall (\d\.\d\d),", run("recall.py", tmp_path), re.M))
    assert max(found, key=lambda name: float(found[name])) == "exact_topk" and len(found) == 5
    pixels = matplotlib.image.imread(tmp_path / "recall.png")
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, pixels.shape[-1]).tolist()}) > 20


def test_cuda_graph_without_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "cuda_graph.py"))
    assert ended.value.code == NO_DEVICE
    assert capsys.readouterr().out == "no CUDA device: torch finds none on this machine, so no step was captured\n"
    assert f"exits with status {NO_DEVICE}" in (EXAMPLES / "README.md").read_text()


@walk
def test_calibrate(tmp_path: Path) -> None:
    """The layer that retrieves is found, written beside the model, and taken by `auto`."""
    printed = run("calibrate.py", tmp_path)
    recipe = saccade.Recipe.read(tmp_path / "model" / "saccade.json")
    assert recipe.reselect == (7,) and str(recipe.policy) == "tidal:budget=64,reselect=7"
    assert re.search(r"^auto: tidal:budget=64,reselect=7, answers ' 4821", printed, re.M), printed


@walk
def test_own_questions(tmp_path: Path) -> None:
    """By default on the file beside it, or on another; only a window forgets."""
    right = re.compile(r"^(\w+).*: (\d+) of (\d+) right", re.M)
    found = {name: (int(got), int(asked)) for name, got, asked in right.findall(run("own_questions.py", tmp_path))}
    assert found["dense"] == found["tidal"] == (6, 6)
    assert found["streaming"][0] < found["quest"][0]
    line = (EXAMPLES / "own_questions.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (tmp_path / "mine.jsonl").write_text(line.replace("4821", "7305") + "\n", encoding="utf-8")
    assert right.findall(run("own_questions.py", tmp_path, "mine.jsonl"))[0] == ("dense", "1", "1")


@walk
def test_the_notebook_runs(tmp_path: Path) -> None:
    """It is kept without outputs, and executed it answers and draws."""
    asked = notebook(EXAMPLES / "compare_policies.ipynb")
    code = [cell for cell in asked.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
    nbclient.NotebookClient(asked, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in code for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    right = {name: right.split(", ") for name, right in re.findall(r"^(\w+).*: \[(.+)\] of 6 right", printed, re.M)}
    assert right["exact_topk"] == right["less_is_more"] == ["6"] * 3
    assert int(right["streaming"][0]) < 3
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 2
