"""The page and the table: complete, self-contained, and made of what there is when a run was interrupted."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest

from printing import kept_figures, printed
from saccade.report import figures as figures_module
from saccade.report.labels import labelled
from saccade.report.page import comparison_page, comparison_report
from saccade.report.palette import SHADES, marks
from saccade.report.table import WIDE, comparison_table


def row(policy: str, budget: int | None, correct: int = 40, n: int = 48, **changes: Any) -> dict[str, Any]:
    spec = policy if budget is None else f"{policy}:budget={budget}"
    return {
        "policy": policy, "budget": budget, "spec": spec, "share_attended": 0.123,
        "recall": 0.25, "recall_with_dense": 0.5, "recall_per_layer": [None, 0.25, 0.25],
        "token_recall": 0.1, "token_recall_with_dense": 0.4, "token_recall_per_layer": [None, 0.1, 0.1],
        "heads_with_set_per_layer": [0.0, 1.0, 1.0], "overflow": 0.0, "index_bytes": 0, "build_seconds": 0.0,
        "fact_held": None if budget is None else 0.75, "correct": correct, "n": n, "interval": (0.7, 0.9),
        "ms_per_token": 8.5, "speedup": 1.25, "timed_tokens": 100, **changes,
    }  # fmt: skip


def results(*rows: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    here = {
        "questions": 48, "context_tokens": [8192, 8200], "document": "a <document>", "model": "tiny", "layers": 3,
        "query_heads": 4, "kv_heads": 2, "dtype": "float32", "device": "cpu", "threads": 1,
        "versions": {"saccade": "0"},
    }  # fmt: skip
    return {"complete": complete, "rows": list(rows), "notes": ["a note"], "environment": here}


def gaze(spec: str, depth: float) -> dict[str, Any]:
    return {"spec": spec, "depth": depth, "correct": depth < 0.5, "fact_held": 0.5, "bins": [0.0, 0.5, 1.0, 0.0]}


def sample(spec: str, answer: str, correct: bool) -> dict[str, Any]:
    question = "What is the code of the <b>bold</b> fox?"
    return {"spec": spec, "context": 0, "question": question, "expected": "1234", "answer": answer, "correct": correct}


FULL = results(row("dense", None, correct=47), row("tidal", 64), row("tidal", 256), row("quest", 64))
GAZES = [gaze(spec, depth) for spec in ("tidal:budget=64", "quest:budget=64") for depth in (0.9, 0.1)]
SAMPLES = [sample("dense", "1234.", True), sample("tidal:budget=64", "<script>alert()</script>", False)]


LISTED = "lychee_decode:budget=64,roles=heads:0+1.1+2"
"""Five of the six heads of the model of `results`."""


@pytest.fixture(scope="module")
def page() -> str:
    return comparison_page(FULL, GAZES, SAMPLES)


def figures_of(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, flags=re.S)


def fetched(page: str) -> list[str]:
    places = re.findall(r"""(?:src|href|srcset|action|data)\s*=\s*["']([^"']*)""", page)
    outside = [one for one in places + re.findall(r"url\(([^)]*)", page) if not one.startswith(("#", "data:"))]
    return outside + re.findall("http|@import|<script", page)


def test_the_page_fetches_nothing_and_escapes_what_models_say(page: str) -> None:
    assert fetched(page) == []
    assert fetched('<img src="a.png"><a href="#b"><style>url(c) @import') == ["a.png", "c", "@import"]
    assert all(words in page for words in ("&lt;script&gt;", "a &lt;document&gt;", "47/48", "a note"))


def test_figures_are_whole_share_no_id_and_take_the_papers_colours(page: str) -> None:
    """Dark mode changes variables of the page; a colour that is written out would stay as it is."""
    figures = figures_of(page)
    # Right answers, times, two recalls, what gazes' colours mean, and a gaze for every policy that looked.
    assert len(figures) == 5 + 2
    for figure in figures:
        # In a page the element's name spaces go without saying.
        whole = figure.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
        assert ElementTree.fromstring(whole).tag == "svg"
    of_figures = [set(re.findall(r'\bid="([^"]*)"', figure)) for figure in figures]
    assert all(of_figures) and sum(map(len, of_figures)) == len(set().union(*of_figures))
    for figure, own in zip(figures, of_figures, strict=True):
        assert {place.strip("#)") for place in re.findall(r'#[\w-]+(?=[")])', figure)} <= own
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6});", part)) for part in page.split("prefers-color-scheme: dark")[:2]
    )
    assert light.keys() == dark.keys()
    assert light.items() >= {name: shade for name, (shade, _) in SHADES.items()}.items()
    assert dark.items() >= {name: shade for name, (_, shade) in SHADES.items()}.items()
    for figure in figures_of(page):
        assert "var(--ink)" in figure and "var(--paper)" in figure
        assert not set(light.values()) & set(re.findall(r"#\w{6}\b", figure))


def contrast(*colors: str) -> float:

    def luminance(color: str) -> float:
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(luminance, colors))
    return (high + 0.05) / (low + 0.05)


def test_every_method_has_its_own_mark_that_is_read_on_either_paper() -> None:
    """WCAG 2 wants 4.5 for text and 3 for graphics; two marks of the Okabe-Ito set are fainter on white, by design."""
    assert contrast("#000000", "#ffffff") == 21
    for paper, wanted in ((0, {"#e69f00", "#56b4e9"}), (1, set[str]())):
        on = SHADES["paper"][paper]
        assert all(contrast(SHADES[name][paper], on) >= 4.5 for name in ("ink", "muted"))
        shown = {color: color for color in (mark["color"] for mark in marks(map(str, range(8))).values())}
        shown |= {shades[0]: shades[paper] for shades in SHADES.values() if shades[0] in shown}
        assert {color for color, drawn in shown.items() if contrast(drawn, on) < 3} == wanted
    drawn = marks([str(number) for number in range(88)])
    assert len({tuple(mark.values()) for mark in drawn.values()}) == 89


def test_what_decides_comes_first_and_what_there_is_is_told(page: str) -> None:
    decides = ["policy", "budget", "right", "95% interval", "speed vs dense", "ms per token", "share of cache"]
    recalls = [f"{kind} recall of heads with a set" for kind in ("attention", "token")]
    headers = re.findall(r"<th>([^<]*)</th>", page.split("</thead>")[0])
    assert headers == [*decides, *recalls, "attention recall with dense heads as 1"]
    # What a narrow window hides is drawn below.
    assert "results first-7" in page
    assert all(f">{name}, by layer<" in figures_of(page)[2 + n] for n, name in enumerate(recalls))
    assert "keep beside the cache" not in page and "buffer holds" not in page
    indexed = row("quest", 64, index_bytes=3 * 2**19, build_seconds=0.25, overflow=0.125)
    page = comparison_page(results(row("dense", None), indexed), [], [])
    assert "quest at 64: 1.50 MiB in 250 ms." in page
    assert "quest</span> at 64: 12.5% of the sets wanted more" in " ".join(page.split())


def test_names_are_short_and_the_whole_spec_is_said_on_hover() -> None:
    listed = row("lychee_decode", 64, spec=LISTED)
    page = comparison_page(results(row("dense", None), listed), [gaze(LISTED, 0.5)], [sample(LISTED, "1", False)])
    assert "lychee_decode:heads=5 of 6 " in figures_of(page)[0]
    names = re.findall(r'<span class="short" title="([^"]*)">(.*?)</span>', page)
    # In the table, above the gaze and beside the answer.
    assert names == [(LISTED, "lychee_decode:<wbr>heads=5 of 6")] * 3
    assert "<code>lychee_decode:roles=heads:0+1.1+2</code>" in page


def test_the_heat_map_is_drawn_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = kept_figures(figures_module, monkeypatch)
    first = row("tidal", 64, recall_per_layer=[None, 0.1234, 0.9])
    second = row("tidal", 256, recall_per_layer=[None, None, 0.5], recall=0.5)
    nothing = row("tidal", 512, recall_per_layer=[None] * 3, recall=None)
    rows = labelled(results(row("dense", None, recall=None), first, second, nothing, row("quest", 64)))
    figures_module.recalls(rows, "recall")
    axes, bar = drawn[0].axes
    (image,) = axes.get_images()
    nan = float("nan")
    expected = [[nan, 0.1234, 0.9], [nan, nan, 0.5], [nan, 0.25, 0.25]]
    numpy.testing.assert_array_equal(image.get_array().filled(nan), expected)
    # An honest scale: from nothing to all, whatever was measured, and said so.
    assert image.get_clim() == (0, 1) and bar.get_xlim() == (0, 1)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["tidal   64", "256", "quest   64"]
    said = {text.get_text(): text.get_position() for text in axes.texts}
    assert said["12"] == (1, 0) and said["90"] == (2, 0)
    assert [said[mean][1] for mean in ("25%", "50%")] == [2, 1]
    figures_module.recalls(rows[:1], "recall")
    assert not drawn[1].axes[0].get_images()
    for layers, numbers in ((24, 24), (80, 0)):
        deep = row("quest", 64, recall_per_layer=[0.5] * layers, recall=0.25)
        figures_module.recalls(labelled(results(deep)), "recall")
        assert sum(text.get_text() == "50" for text in drawn[-1].axes[0].texts) == numbers


def test_a_page_is_made_again_from_what_the_folder_holds(tmp_path: Path, page: str) -> None:
    for name, records in (("gaze.jsonl", GAZES), ("samples.jsonl", SAMPLES)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "results.json").write_text(json.dumps(FULL))
    assert comparison_report(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text() == page


UNKNOWN = {**dict.fromkeys(("recall", "token_recall")), "recall_per_layer": [], "token_recall_per_layer": []}


@pytest.mark.parametrize(
    "rows",
    [
        (row("dense", None),),
        (row("dense", None), row("tidal", 64, 0, 0, interval=(0.0, 1.0), **UNKNOWN)),
        (row("dense", None), row("other", None)),
    ],
    ids=["dense only", "nothing answered yet", "no budget"],
)
def test_partial_results_have_a_page_too(rows: tuple[dict[str, Any], ...]) -> None:
    page = comparison_page(results(*rows, complete=False), [], [])
    assert "interrupted" in page and len(figures_of(page)) == 4


def compared(rows: dict[str, Any], width: int, **options: Any) -> list[str]:
    return printed(comparison_table(rows, width, **options), min(width, WIDE))


@pytest.mark.parametrize(("width", "columns"), [(80, 8), (100, 9)])
def test_the_table_fits_a_narrow_terminal(width: int, columns: int) -> None:
    rows = results(row("dense", None), row("less_is[red]", 4096)) | {"notes": ["a [red] note"]}
    said = compared(rows, width)
    # Brackets are no markup, neither here nor in a cell.
    assert "a [red] note" in said
    lines = [line.split() for line in said]
    cells = [line for line in lines if "1.25x" in line]
    assert [len(line) for line in cells] == [columns, columns]
    # What decides comes first; recall of heads with a set comes last, and the header names it so.
    assert cells[1][:5] == ["less_is[red]", "4,096", "40/48", "0.70-0.90", "1.25x"]
    assert [line[7:] for line in cells] == [["0.25", "0.10"][: columns - 7]] * 2
    header = " ".join(" ".join(line) for line in lines[: lines.index(cells[0])])
    assert header.count("heads") == columns - 7 and "recall" in header


@pytest.mark.parametrize("width", [80, 100])
def test_terms_of_a_comparison_are_columns(width: int) -> None:
    """Bytes with index in the place of attended tokens, and where there is room for it the frame."""
    terms = {"cache_read": 0.0625, "frame": (128, 256), "dense_layers": 2}
    dense = row("dense", None) | {"cache_read": 1.0, "frame": None, "dense_layers": 24}
    rows = results(dense, row("lychee_decode", 131072, 1234, 2400, ms_per_token=1234.5) | terms)
    said = [line.split() for line in compared(rows, width)]
    (line,) = [line for line in said if "lychee_decode" in line]
    assert "6.2%" in line and "12.3%" not in line and ("128+256," in line) == (width == WIDE)
    page = comparison_page(rows, [], [])
    headers = re.findall(r"<th>([^<]*)</th>", page.split("</thead>")[0])
    assert headers[6:9] == ["share of cache", "cache read, index too", "sinks+ window, dense layers"]
    assert "128+256, 2" in page and "-, 24" in page


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_of_a_large_model_fits_100_columns(width: int) -> None:
    """Names as long as they get, budgets and questions of a long run; no number is broken or cut off."""
    lists = ["+".join(f"{layer}.{layer % 2}" for layer in range(first, 60)) for first in (1, 2, 3)]
    specs = [f"lychee_decode:budget=131072,roles=heads:0+{one},page=64,rectify=16" for one in lists]
    rows = [row("lychee_decode", 131072, 1234, 2400, spec=spec, ms_per_token=1234.5) for spec in specs]
    said = compared(results(row("dense", None, n=2400), *rows) | {"notes": ["a note " * 40]}, width)
    assert max(map(len, said)) <= min(width, WIDE) <= 100
    assert sum("131,072 1234/2400" in " ".join(line.split()) for line in said) == 3
    assert all("1234.50" in line for line in said if "131,072" in line)
    # Below, what the short names stand for.
    assert "".join("".join(said).split()).count("lychee_decode:roles=heads:0+") == 3


def test_a_brief_table_has_a_line_per_row_and_nothing_below() -> None:
    said = compared(FULL, 100, brief=True)
    assert [line.split()[0] for line in said[-4:]] == ["dense", "tidal", "tidal", "quest"]
    *whole, note = compared(FULL, 100)
    assert [line.split()[:1] for line in whole[-6:]] == [["dense"], [], ["tidal"], ["tidal"], [], ["quest"]]
    assert note == "a note"


def test_the_table_writes_what_is_missing_as_a_dash() -> None:
    recalls = ("recall", "token_recall", "recall_with_dense")
    missing = dict.fromkeys(("share_attended", *recalls, "ms_per_token", "speedup"))
    unknown = row("tidal", 64, correct=0, n=0, **missing)
    lines = compared(results(row("dense", None), unknown, complete=False), 140)
    (line,) = [line for line in lines if "tidal" in line]
    assert line.split() == ["tidal", "64", "0/0", "-", "-", "-", "-", "-", "-"]
    assert any("a note" in line for line in lines) and "(interrupted)" in " ".join(lines[:2])
