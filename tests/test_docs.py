"""The documentation: its tables are those of the results, nothing in it is typed that was measured, and it is short."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from claims import stored
from claims.judging.discovery import found
from docs import hooks
from limits import LIMITS, limit
from saccade.errors import SaccadeError
from tables import front, serving
from tables.blocks import BLOCKS, PICTURES, drawn, pages
from tables.page import DOCS, Made, filled, typed, unmade

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


def test_tables_are_those_of_the_results() -> None:
    texts = {named(path): path.read_text(encoding="utf-8") for path in pages()}
    assert {name: filled(text, BLOCKS) for name, text in texts.items()} == texts, "run python -m benchmarks tables"


def test_pictures_are_those_of_the_results() -> None:
    kept = {name: (DOCS / "images" / name).read_text(encoding="utf-8") for name in PICTURES}
    assert [name for name in PICTURES if drawn(name) != kept[name]] == [], "run python -m benchmarks tables"


def test_every_block_and_every_result_is_on_a_page() -> None:
    asked = {name for path in pages() for name in re.findall(r"<!-- made: ([\w-]+) -->", path.read_text("utf-8"))}
    assert asked == set(BLOCKS)
    claims = [one for listed in found().values() for one in (listed.claim, listed.claim.published) if one is not None]
    judged = {Path(getattr(one.settings, "file", "")).stem for one in claims}
    kept = {path.name.removesuffix(".gz").removesuffix(".json") for path in stored.RESULTS.iterdir() if path.is_file()}
    assert kept <= {block.file for block in BLOCKS.values()} | judged


def test_no_figure_is_typed() -> None:
    texts = {named(path): typed(path.read_text(encoding="utf-8")) for path in written()}
    told = [(name, match.group(0)) for name, text in texts.items() for match in MEASURED.finditer(text)]
    assert [(name, figure) for name, figure in told if figure not in ALLOWED] == []


@pytest.mark.parametrize(
    "line", ["5.47 ms", "it is 1.65× faster", "35/48", "47 of 48", "| `tidal` | 12.5% |", "4,259 GB/s", "-13.3 points"]
)
def test_a_typed_figure_is_found(line: str) -> None:
    assert MEASURED.search(typed(f"text\n\n{line}\n"))
    made = f"<!-- made: demo -->\n{line}\n<!-- end -->"
    assert not MEASURED.search(typed(f"{made}\n\n```\n{line}\n```\n`{line}`, 128K × 4\n"))


def test_readme_counts_the_models_that_the_page_lists() -> None:
    page = (DOCS / "transformers.md").read_text(encoding="utf-8")
    ((version, types),) = re.findall(r"^transformers (\d+\.\d+)\.\d+, (\d+) types", page, re.MULTILINE)
    (accepted,) = re.findall(r"\*\*Accepted, (\d+)\*\*", page)
    (wrappers,) = re.findall(r"^(\d+) are accepted", page, re.MULTILINE)
    told = f"{accepted} of the {types} types of causal language models in transformers {version} and {wrappers} w"
    assert told in " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())


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


ENVIRONMENT = {
    **{"device": "cpu", "processor": "EPYC", "kernels": "native", "threads": 1, "dtype": "bfloat16"},
    **{"date": "2026-11-23T", "versions": {"torch": "2.13.0"}},
}


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
