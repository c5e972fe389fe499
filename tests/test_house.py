"""The size of the house, row by row, against tests/limits.py; and that limits grow by what an issue allows alone."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from limits import ALLOWANCES, CASES, COLLECTED, LIMITS, limit
from parsing import parsed
from projects import project
from tables.page import unmade
from test_architecture import ARROWS, EVERYWHERE, PACKAGE, broken_arrows, circles

ROOT = Path(__file__).parents[1]
MEASURING = ("eval", "calibrate", "bench", "report", "cli")
"""Rooms that measure or show instead of decoding."""


def lines_of(folder: Path, *endings: str) -> dict[Path, int]:
    found = (path for ending in endings for path in folder.rglob(f"*{ending}"))
    return {path: len(path.read_text(encoding="utf-8").splitlines()) for path in found}


def words_by_hand() -> int:
    """Of all Markdown that git keeps, but for the log and for tables made from results."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", ":!docs/log.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    texts = (unmade((ROOT / name).read_text(encoding="utf-8")) for name in listed.stdout.splitlines())
    return sum(len(re.findall(r"\S*\w\S*", text)) for text in texts)


def house() -> dict[str, int]:
    """What the house is measured by; cases of tests are counted where they are collected."""
    lines = lines_of(PACKAGE, ".py")
    rooms = {path: path.relative_to(PACKAGE).parts[0] for path in lines}
    others = [row.removeprefix("lines of ") for row in LIMITS if re.fullmatch(r"lines of \w+", row)]
    return {
        "loose files": len(list(PACKAGE.glob("*.py"))),
        "rows of the import table beside adapters.vllm": len(set(ARROWS) - {"adapters.vllm"}),
        "imports against the table": len(broken_arrows(PACKAGE)),
        "files that import in a circle": len(circles(*EVERYWHERE)),
        "lines of Python in src": sum(lines.values()),
        "of them measuring": sum(length for path, length in lines.items() if rooms[path] in MEASURING),
        "lines of C in src": sum(lines_of(PACKAGE, ".c", ".h").values()),
        "longest file outside kernels": max(length for path, length in lines.items() if rooms[path] != "kernels"),
        "hard dependencies": len(project()["dependencies"]),
        **{f"lines of {folder}": sum(lines_of(ROOT / folder, ".py").values()) for folder in others},
        "words by hand, the log left out": words_by_hand(),
    }


def test_the_house_keeps_its_size() -> None:
    counted = house()
    assert {name: count for name, count in counted.items() if count > limit(name)} == {}


def test_cases_are_counted(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[COLLECTED] <= limit(CASES)


def versions() -> Iterator[tuple[dict[str, int], list[tuple[str, int, int]]]]:
    """The limits and allowances of every commit that changed them on the way that landed, oldest first, then now's."""
    at = "tests/limits.py"
    git = ("git", "-C", str(ROOT))
    log = subprocess.run([*git, "log", "--first-parent", "--format=%H", at], capture_output=True, text=True, check=True)
    for commit in reversed(log.stdout.split()):
        kept = subprocess.run([*git, "show", f"{commit}:{at}"], capture_output=True, text=True, check=True)
        nodes = [node for node in parsed(kept.stdout).body if isinstance(node, ast.Assign | ast.AnnAssign)]
        values = {ast.unparse(getattr(node, "target", None) or node.targets[0]): node.value for node in nodes}
        yield ast.literal_eval(values["LIMITS"]), list(ast.literal_eval(values["ALLOWANCES"]))
    yield LIMITS, list(ALLOWANCES)


def grown(before: dict[str, int], after: dict[str, int], allowed: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """By how much rows hold more than what they did with what is newly allowed."""
    more = {name: sum(amount for row, amount, _ in allowed if row == name) for name in after}
    return {
        name: after[name] - before[name] - more[name]
        for name in after.keys() & before.keys()
        if after[name] > before[name] + more[name]
    }


def test_limits_shrink_or_grow_by_what_an_issue_allows() -> None:
    for (before, old), (after, new) in pairwise(versions()):
        # An allowance that has gone has been written into its row.
        assert grown(before, after, [one for one in old if one not in new]) == {}
        assert before.keys() <= after.keys()


def test_a_limit_that_grows_is_found() -> None:
    before, allowed = {"lines": 10, "words": 5}, [("lines", 2, 44)]
    assert grown(before, {"lines": 12, "words": 5}, allowed) == {}
    assert grown(before, {"lines": 13, "words": 4}, allowed) == {"lines": 1}
    assert grown(before, {"lines": 11}, []) == {"lines": 1}
