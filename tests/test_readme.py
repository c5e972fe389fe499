"""The README: as short as it was meant to be, and what it shows runs."""

import re
from pathlib import Path
from typing import Any

import pytest

import saccade
from saccade.checkpoints.bundled import model_path
from saccade.methods import registry

PAGE = Path(__file__).parents[1] / "README.md"
TEXT = PAGE.read_text(encoding="utf-8")
WORDS, COLUMNS = 700, 120


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_words_and_columns() -> None:
    read = re.sub(r"^```.*?^```$|<!--.*?-->|\]\([^)]*\)", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"\S*\w\S*", read)) <= WORDS
    # What a command makes stands in one line, as tables do.
    written = re.sub(r"<!-- made: .*?<!-- end -->", "", TEXT, flags=re.DOTALL)
    assert [line for line in written.splitlines() if len(line) > COLUMNS] == []


def test_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT) if "://" not in target]
    assert targets
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []


def test_commands_are_those_of_make() -> None:
    rules = (PAGE.parent / "Makefile").read_text(encoding="utf-8")
    asked = re.findall(r"^make (\S+)", "\n".join(blocks("bash")), re.MULTILINE)
    assert asked == ["demo", "test"]
    assert all(re.search(rf"^{target}:", rules, re.MULTILINE) for target in asked)


def test_the_library_in_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As it stands, on the bundled model, in whose layer 7 facts are found."""
    code = blocks("python")[0]
    assert len([line for line in code.splitlines() if line]) <= 10
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("A letter came in the morning, and nobody knew from whom. " * 40, encoding="utf-8")
    for shown, real in (
        ("./Qwen3-8B", str(model_path())),
        ("budget=2048,reselect=12", "budget=64,reselect=7"),
        ("max_new_tokens=256", "max_new_tokens=4"),
    ):
        assert shown in code
        code = code.replace(shown, real)
    exec(compile(code, "<README.md>", "exec", dont_inherit=True), {})
    assert 0 < float(capsys.readouterr().out.split()[-1]) < 1


def test_a_method_of_your_own() -> None:
    code = blocks("python")[1]
    assert len([line for line in code.splitlines() if line]) <= 20
    known = dict(registry._METHODS)
    try:
        exec(compile(code, "<README.md>", "exec", dont_inherit=True), {"__name__": "readme"})
        assert saccade.policy("mean_topk", budget=32).name == "mean_topk"
    finally:
        registry._METHODS.clear()
        registry._METHODS.update(known)
