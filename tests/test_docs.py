"""The documentation: its tables are those of the results, nothing in it is typed that was measured, and it is short."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tables import decoding, front, serving
from benchmarks.tables.blocks import BLOCKS, PICTURES, drawn, pages
from benchmarks.tables.page import DOCS, Made, filled, typed, unmade
from claims import stored
from claims.judging.discovery import found
from docs import hooks
from limits import LIMITS, limit
from saccade.errors import SaccadeError

_ROW = "words by hand, the log left out"
WORDS = 14_700 + limit(_ROW) - LIMITS[_ROW]
"""That somebody wrote, on all pages but the log, the changes and the API; 200 of them say how the ledger in claims.md,
which is generated, is to be read."""

# Speeds, times, shares, sizes and scores: whoever types them must keep them true by hand.
MEASURED = re.compile(
    r"\d[\d.,]* ?(?:×(?! \d)|%|ms\b|µs\b|GB\b|MB\b|GB/s|times (?:as )?(?:fast|slow)|points\b)"
    r"|\b\d+ of \d+\b|\b\d+/\d+\b"
)
ALLOWED = {"95%": "a level of confidence", "99%": "what `tune` is asked to keep"}


def written() -> list[Path]:
    return [path for path in pages() if path.name not in {"changelog.md", "README.md"}]


def named(path: Path) -> str:
    return os.path.relpath(path, DOCS)


@pytest.mark.parametrize("path", pages(), ids=named)
def test_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert filled(text, BLOCKS) == text, "run python -m benchmarks tables"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_the_results(name: str) -> None:
    kept = (DOCS / "images" / name).read_text(encoding="utf-8")
    assert drawn(name) == kept, "run python -m benchmarks tables"


def test_every_block_and_every_result_is_on_a_page() -> None:
    asked = {name for path in pages() for name in re.findall(r"<!-- made: ([\w-]+) -->", path.read_text("utf-8"))}
    assert asked == set(BLOCKS)
    judged = {Path(getattr(listed.claim.settings, "file", "")).stem for listed in found().values()}
    kept = {path.name.partition(".")[0] for path in stored.RESULTS.iterdir() if path.is_file()}
    assert kept <= {block.file for block in BLOCKS.values()} | judged


@pytest.mark.parametrize("path", written(), ids=named)
def test_no_figure_is_typed(path: Path) -> None:
    found = {match.group(0) for match in MEASURED.finditer(typed(path.read_text(encoding="utf-8")))}
    assert found - set(ALLOWED) == set()


@pytest.mark.parametrize(
    "line", ["5.47 ms", "it is 1.65× faster", "35/48", "47 of 48", "| `tidal` | 12.5% |", "4,259 GB/s", "-13.3 points"]
)
def test_a_typed_figure_is_found(line: str) -> None:
    assert MEASURED.search(typed(f"text\n\n{line}\n"))
    made = f"<!-- made: demo -->\n{line}\n<!-- end -->"
    assert not MEASURED.search(typed(f"{made}\n\n```\n{line}\n```\n`{line}`, 128K × 4\n"))


def test_pages_are_short() -> None:
    texts = {named(path): unmade(path.read_text(encoding="utf-8")) for path in written() if path.parent == DOCS}
    texts["design.md"] = (DOCS.parent / "DESIGN.md").read_text(encoding="utf-8")
    counted = {name: len(re.findall(r"\S*\w\S*", text)) for name, text in texts.items()}
    assert sum(counted.values()) <= WORDS, counted


def test_a_block_without_results_says_what_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stored, "RESULTS", tmp_path)
    block = Made(lambda results: [results["line"]], "speed", "saccade bench")
    assert "`saccade bench` writes `speed.json`" in block.text()
    (tmp_path / "speed.json").write_text('{"line": "| 1 |"}', encoding="utf-8")
    assert block.text() == "\n| 1 |\n\n"
    assert replace(block, file="", lines=lambda _: ["counted"]).text() == "\n<small>counted</small>\n\n"


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(SaccadeError, match="table 'novel' is not valid; there are one"):
        filled("<!-- made: novel -->\n<!-- end -->", {"one": Made(lambda _: [])})


def test_public_names_have_docstrings_and_a_page() -> None:
    assert hooks.undocumented() == [] and hooks.homeless() == []


def test_a_name_without_a_docstring_is_found() -> None:
    class Bare:
        """Says `much`.

        Attributes:
            one, two: said.
        """

        much: int = 1
        one: int
        two: int = 2
        three: int = 3

        def silent(self) -> None: ...

        def spoken(self) -> None:
            """Said."""

    class Over(Bare):
        """Overrides."""

        def spoken(self) -> None: ...

    assert {name for name, said in hooks.members("x", Bare) if not said} == {"x.three", "x.silent"}
    assert {name for name, said in hooks.members("x", Over) if not said} == set()


def test_what_a_page_would_fetch_is_found() -> None:
    assert (
        hooks.fetched('<a href="https://example.org">x</a><script src="worker.js"></script><link href="a.css">') == []
    )
    for line in (
        '<script async src="https://a.b/c.js">',
        '<img src="//a.b/c.png">',
        '<link rel="x" href="http://a.b">',
    ):
        assert len(hooks.fetched(line)) == 1, line


CPU = {
    "device": "cpu",
    "processor": "EPYC",
    "kernels": "native",
    "threads": 1,
    "dtype": "bfloat16",
    "date": "2026-11-23T",
}
ENVIRONMENT = {**CPU, "versions": {"torch": "2.13.0"}}


def test_steps_of_our_engine_stand_beside_the_best_dense_one() -> None:
    def row(policy: str, runtime: str, context: int, ms: float, over: float) -> dict[str, object]:
        size = 600 if policy == "stock" else 400
        times = {"ms_per_token": ms, "speedup_over_best_dense": over, "share_of_ceiling": 0.5, "bytes": size}
        return {"policy": policy, "runtime": runtime, "context": context, "batch": 1, "threads": 1, **times}

    rows = [row("stock", "transformers", 0, 40, 0.5), row("stock", "transformers", 32768, 1000, 0.05)]
    rows += [row("tidal:budget=2048", "saccade", 0, 20, 1), row("tidal:budget=2048", "saccade", 32768, 25, 2)]
    lines = decoding.steps({"rows": rows, "environment": ENVIRONMENT}, "saccade bench decode")
    assert lines[0] == "| batch 1, 1 thread | 0 tokens | 32K tokens | share of the ceiling | bytes allow |"
    assert lines[2:4] == [
        "| stock transformers | 40.0 (0.50) | 1000.0 (0.05) | 50% | 1.00 |",
        "| `tidal` | 20.0 (1.00) | 25.0 (2.00) | 50% | 1.50 |",
    ]
    assert "EPYC, bfloat16, 1 thread, native, torch 2.13.0, 2026-11-23. `saccade bench decode`" in lines[-1]


def test_stock_is_the_mean_of_its_runs_and_the_worst_point_is_named() -> None:
    times = {("stock", 16): 4, ("stock (last)", 16): 6, ("quest", 16): 10, ("stock", 8192): 8, ("quest", 8192): 4}
    rows = [
        {"policy": policy, "context": context, "batch": 2, "ms_per_token": ms, "share_of_ceiling": 0.9}
        for (policy, context), ms in times.items()
    ]
    results = {"shape": "smollm2-135m", "rows": rows, "environment": ENVIRONMENT}
    lines = serving.speed(results, "serve_cpu")
    assert lines[2:4] == ["| 8K × 2 | 8.00 | 4.00 (2.00) |", "| 16 × 2 | 5.00 | 10.00 (0.50) |"]
    assert lines[-1].startswith("smollm2-135m with random weights, EPYC, ")
    assert serving.slower(results)[-1] == "| `quest` | 2.00 (16 × 2) | 0.50 (8K × 2) |"
    assert serving.ceiling(results)[-1] == "| 8K × 2 | 90% |"


def test_what_cannot_be_compared_is_compared_nowhere() -> None:
    """Stock's runs differ at one point: there both tables have times alone, and it is nobody's worst."""
    times = {"stock": 8, "stock (last)": 9, "quest": 4}
    rows = [
        {"policy": policy, "context": context, "batch": batch, "ms_per_token": ms, "drift": 0.12, "void": batch == 4}
        for policy, ms in times.items()
        for context, batch in front.POINTS
    ]
    results = {"shape": "llama-3.1-8b", "rows": rows, "environment": ENVIRONMENT}
    results |= {"settings": {"steps": 33}, "command": "saccade bench serve"}
    assert [line for line in front.speed(results) if line.startswith("| 128K")] == [
        "| 128K × 1 | 8.5 | 4.0 (2.12×) |",
        "| 128K × 4 | 8.5 | 4.0 |",
    ]
    lines = serving.speed(results, "serve_cpu")
    assert "| 128K × 4 | 8.50 | 4.00 |" in lines
    assert "Stock's two runs differ too much for a comparison at 128K × 4 (+12.0%)." in lines
    worse = [row | {"ms_per_token": 99} if row["void"] and row["policy"] == "quest" else row for row in rows]
    assert serving.slower({"rows": worse})[-1] == "| `quest` | – | 0.47 (128K × 1) |"


def test_passes_say_their_share_where_it_was_timed() -> None:
    times = {name: {"ms": ms} for name, ms in (("one dense token", 0.1), ("pass", 0.2), ("torch, masked", 3.0))}
    point = {"heads": [32, 8, 128], "context": 131_072, "batch": 4, "times": times}
    results = {"tokens": 33, "environment": ENVIRONMENT, "points": [point]}
    without = decoding.passes(results, "command", "file")
    point["rectified"] = {"share": 0.254}
    told = decoding.passes(results, "command", "file")
    assert [line.count("|") for line in told[:3]] == [line.count("|") + 1 for line in without[:3]]
    assert told[2].endswith("| 25% |") and "128K × 4" in without[2]
