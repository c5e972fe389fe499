"""The page and the table: complete, self-contained, and made of what there is when a run was interrupted."""

from __future__ import annotations

import base64
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from saccade.report.page import comparison_page
from saccade.report.palette import marks
from saccade.report.table import comparison_table


def row(policy: str, budget: int | None, correct: int = 40, n: int = 48, **changes: Any) -> dict[str, Any]:
    spec = policy if budget is None else f"{policy}:budget={budget}"
    return {
        "policy": policy,
        "budget": budget,
        "label": policy,
        "spec": spec,
        "share_attended": 0.123,
        "recall": 0.25,
        "recall_with_dense": 0.5,
        "recall_per_layer": [None, 0.25, 0.25],
        "token_recall": 0.1,
        "token_recall_with_dense": 0.4,
        "token_recall_per_layer": [None, 0.1, 0.1],
        "heads_with_set_per_layer": [0.0, 1.0, 1.0],
        "overflow": 0.0,
        "index_bytes": 0,
        "build_seconds": 0.0,
        "fact_held": None if budget is None else 0.75,
        "correct": correct,
        "n": n,
        "interval": (0.7, 0.9),
        "ms_per_token": 8.5,
        "speedup": 1.25,
        "timed_tokens": 100,
        **changes,
    }


def results(*rows: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    here = {
        "questions": 48,
        "context_tokens": [8192, 8200],
        "document": "a <document>",
        "model": "tiny",
        "layers": 3,
        "query_heads": 4,
        "kv_heads": 2,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "versions": {"saccade": "0"},
    }
    return {"complete": complete, "rows": list(rows), "notes": ["a note"], "environment": here}


def gaze(spec: str, depth: float) -> dict[str, Any]:
    return {"spec": spec, "depth": depth, "correct": depth < 0.5, "fact_held": 0.5, "bins": [0.0, 0.5, 1.0, 0.0]}


def sample(spec: str, answer: str, correct: bool) -> dict[str, Any]:
    question = "What is the code of the <b>bold</b> fox?"
    return {"spec": spec, "context": 0, "question": question, "expected": "1234", "answer": answer, "correct": correct}


FULL = results(row("dense", None, correct=47), row("tidal", 64), row("tidal", 256), row("quest", 64))
GAZES = [gaze(spec, depth) for spec in ("tidal:budget=64", "quest:budget=64") for depth in (0.9, 0.1)]
SAMPLES = [sample("dense", "1234.", True), sample("tidal:budget=64", "<script>alert()</script>", False)]


def figures_of(page: str) -> list[str]:
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)]


def test_the_page_fetches_nothing_and_escapes_what_models_say() -> None:
    page = comparison_page(FULL, GAZES, SAMPLES)
    assert "http" not in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "a &lt;document&gt;" in page
    assert "47/48" in page
    assert "a note" in page


def test_figures_are_whole_svg_files() -> None:
    figures = figures_of(comparison_page(FULL, GAZES, SAMPLES))
    assert len(figures) == 3
    for figure in figures:
        assert ElementTree.fromstring(figure).tag.endswith("svg")


def test_recall_is_named_for_what_it_is() -> None:
    page = comparison_page(FULL, GAZES, SAMPLES)
    headers = re.findall(r"<th>([^<]*)</th>", page)
    recalls = [header for header in headers if "recall" in header]
    names = ["attention recall of heads with a set", "token recall of heads with a set"]
    assert recalls == [*names, "attention recall with dense heads as 1"]
    assert all(f"<!-- {name} -->" in figures_of(page)[1] for name in names)


def test_the_page_tells_of_indexes_and_overflows_where_there_are_any() -> None:
    plain = comparison_page(FULL, GAZES, SAMPLES)
    assert "keep beside the cache" not in plain
    assert "buffer holds" not in plain
    indexed = row("quest", 64, index_bytes=3 * 2**19, build_seconds=0.25, overflow=0.125)
    page = comparison_page(results(row("dense", None), indexed), [], [])
    assert "quest at 64: 1.50 MiB in 250 ms." in page
    assert "quest:budget=64: 12.5% of the sets wanted more" in page


def test_every_method_has_its_own_mark() -> None:
    drawn = marks([str(number) for number in range(88)])
    assert len(set(drawn.values())) == 89


def test_the_same_results_give_the_same_page() -> None:
    assert comparison_page(FULL, GAZES, SAMPLES) == comparison_page(FULL, GAZES, SAMPLES)


@pytest.mark.parametrize(
    "rows",
    [
        (row("dense", None),),
        (
            row("dense", None),
            row("tidal", 64, 0, 0, interval=(0.0, 1.0), recall=None, recall_per_layer=[], token_recall_per_layer=[]),
        ),
        (row("dense", None), row("other", None)),
        tuple(row(f"policy-{number}", 64) for number in range(9)),
    ],
    ids=["dense only", "nothing answered yet", "no budget", "many policies"],
)
def test_partial_results_have_a_page_too(rows: tuple[dict[str, Any], ...]) -> None:
    page = comparison_page(results(*rows, complete=False), [], [])
    assert "interrupted" in page
    assert len(figures_of(page)) == 2


@pytest.mark.parametrize(("width", "columns"), [(80, 8), (100, 10)])
def test_the_table_fits_a_narrow_terminal(width: int, columns: int) -> None:
    console = Console(width=width, record=True)
    rows = results(row("dense", None), row("less_is_more", 4096))
    console.print(comparison_table(rows, ["a [red] note"], width))
    # Brackets are no markup.
    assert "a [red] note" in console.export_text(clear=False)
    lines = [line.split() for line in console.export_text().splitlines()]
    cells = [line for line in lines if "1.25x" in line]
    assert [len(line) for line in cells] == [columns, columns]
    # Recall of heads with a set comes first, and the header names it so; then token recall, then dense heads as 1.
    assert [line[3 : columns - 4] for line in cells] == [["0.25", "0.10", "0.50"][: columns - 7]] * 2
    assert sum("heads" in line and "with" in line for line in lines) == 1
    assert sum("dense" in line and "heads" in line for line in lines) == (columns == 10)


def test_the_table_writes_what_is_missing_as_a_dash() -> None:
    console = Console(width=140, record=True)
    recalls = ("recall", "token_recall", "recall_with_dense")
    missing = dict.fromkeys(("share_attended", *recalls, "ms_per_token", "speedup"))
    unknown = row("tidal", 64, correct=0, n=0, **missing)
    console.print(comparison_table(results(row("dense", None), unknown, complete=False), ["a note"]))
    lines = console.export_text().splitlines()
    (line,) = [line for line in lines if "tidal" in line]
    assert line.split() == ["tidal", "64", "-", "-", "-", "-", "0/0", "-", "-", "-"]
    assert any("a note" in line for line in lines)
    assert "(interrupted)" in " ".join(lines[:2])
