"""Table, page and pictures of `saccade tune`: the right figures, what decides first, and nothing fetched."""

import re
from typing import Any

import pytest

from printing import cells, kept_figures, printed, said
from saccade.report import tune as tune_module
from saccade.report.page import tune_page
from saccade.report.table import WIDE
from saccade.report.tune import front_table


def row(family: str, spec: str, size: float, searched: float, ratio: float | None, status: str) -> dict[str, Any]:
    shown = None if ratio is None else ratio - 0.01
    found = {"family": family, "spec": spec, "bytes": size, "searched": searched, "ratio": ratio, "shown": shown}
    return found | {"status": status}


ROLES = "heads:0+" + "+".join(f"{layer}.{layer % 4}" for layer in range(1, 60))
ROWS = [
    row("quest", "quest:budget=1024", 8.0e6, 0.9921, 0.9908, "kept"),
    row("quest", "quest:budget=64", 6.5e6, 0.8403, None, "not judged"),
    row("resa", "resa:ratio=0.25,min_pages=1", 8.4e6, 0.9664, None, "not judged"),
    row("resa", "resa:ratio=0.125,min_pages=1", 7.05e6, 0.9899, 0.9805, "behind a failed one"),
    row("tidal:reselect=7", "tidal:budget=128,reselect=7", 7.1e6, 0.991, 0.9906, "kept"),
    row(f"lychee_decode:roles={ROLES}", f"lychee_decode:budget=64,roles={ROLES}", 7.0e6, 0.98, 0.75, "failed"),
]  # fmt: skip


def front_results(**changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "read": "mine.txt", "context": 2048, "dtype": "float32", "measure": "agreement",
        "dense_bytes": 1.5 * max(row["bytes"] for row in changes.get("rows", ROWS)), "batch": 1, "n": 2380,
        "wanted": 0.98, "alpha": 0.05, "best_shown": 0.9951, "texts": {"searched": [1, 3], "judged": [*range(4, 94)]},
        "environment": {"device": "cpu"}, "rows": ROWS, "chosen": "tidal:budget=128,reselect=7", **changes,
    }  # fmt: skip


def test_the_front_says_what_was_shown_and_chosen() -> None:
    lines = cells(front_table(front_results()))
    assert ["quest", "1,024", "kept", "0.9808", "8", "0.9908", "0.9921"] in lines
    assert ["64", "not", "judged", "-", "6.5", "-", "0.8403"] in lines
    assert ["ratio=0.125", "behind", "a", "failed", "one", "0.9705", "7.05", "0.9805", "0.9899"] in lines
    assert ["tidal:reselect=7", "128", "kept,", "chosen", "0.9806", "7.1", "0.9906", "0.9910"] in lines
    text = said(front_table(front_results()))
    assert "model tiny, mine.txt, context 2,048, batch 1" in text and "MB per" in text
    assert "the share of key tokens that keep dense attention's likeliest token" in text
    assert "is at least 0.98, with 95% confidence over texts" in text
    assert "2 texts chose who is judged, 90 others judged" in text and "these show 0.9951" in text
    assert "judged by 2,380 key tokens" in text
    assert "chosen, by bytes per token: tidal:budget=128,reselect=7" in text
    asked = said(front_table(front_results(measure="quality")))
    assert "promise: right answers, over dense attention's, are at least 0.98" in asked and "key tokens" not in asked
    terms = {"cache_read": 0.1, "frame": (4, 64), "dense_layers": 2}
    lines = cells(front_table(front_results(rows=[one | terms for one in ROWS])))
    assert ["quest", "1,024", "kept", "0.9808", "4+64,", "2", "8", "0.9908", "0.9921"] in lines


@pytest.mark.parametrize("width", [80, 100])
def test_a_long_family_has_a_short_name_and_is_told_whole_once(width: int) -> None:
    """And the table of candidates is no wider than 100 columns."""
    results = front_results(environment={"layers": 60, "kv_heads": 4})
    lines = printed(front_table(results), min(width, WIDE))
    text = "".join("".join(lines).split())
    assert text.count(ROLES) == 1 and f"lychee_decode:heads=63of240islychee_decode:roles={ROLES}" in text
    assert any(line.startswith("lychee_decode:heads=63 of 240   ") for line in lines) == (width >= WIDE)
    assert max(map(len, lines)) <= min(width, WIDE) <= 100


def test_the_page_of_a_tuning_says_what_was_chosen_and_fetches_nothing() -> None:
    results = front_results(environment={"layers": 60, "kv_heads": 4, "device": "cpu"})
    page = tune_page(results)
    said = " ".join(re.sub("<[^>]*>", "", page).split())
    assert "Chosen: tidal:reselect=7 at 128. Its agreement with dense attention was shown to be at least 98.06%" in said
    headers = re.findall(r"<th[^>]*>([^<]*)</th>", page.split("</thead>")[0])
    assert headers[:5] == ["policy", "budget", "status", "at least", "MB per token"]
    assert len(re.findall(r'<tr class="[^"]*chosen', page)) == 1
    assert f'title="lychee_decode:budget=64,roles={ROLES}"' in page and ">heads=63 of 240</span>" in page
    assert page.count("<svg") == 2
    assert not re.findall(r"""http|<script|@import|(?:src|href)="(?!#|data:)|url\((?!#)""", page)


def test_nothing_chosen_leaves_dense_attention() -> None:
    rows = [one | {"status": "not judged", "ratio": None, "shown": None} for one in ROWS]
    results = front_results(rows=rows, chosen=None, n=0)
    text = said(front_table(results))
    assert "nothing is shown to keep the promise: dense attention stays" in text
    assert "chosen" not in text and "judged by" not in text
    assert tune_page(results).count("<svg") == 2


@pytest.mark.parametrize(
    ("rows", "pictures"),
    [
        (ROWS, 2),
        (ROWS[:1], 1),
        ([one | {"searched": 0.1, "ratio": 0.1, "shown": 0.05} for one in ROWS[:2]], 1),
        ([one | {"bytes": 3e9} for one in ROWS], 2),
    ],
    ids=["all", "one", "far below", "equal bytes"],
)
def test_the_front_is_drawn(rows: list[dict[str, Any]], pictures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark for every candidate, filled if it kept the promise, and a ring around the chosen one; twice if near."""
    figures = kept_figures(tune_module, monkeypatch)
    assert len(set(tune_module.front_pictures(front_results(rows=rows)))) == len(figures) == pictures
    unit = 1e9 if rows[0]["bytes"] == 3e9 else 1e6
    wanted = sorted((tune_module._ratio(one), one["bytes"] / unit, one["status"] == "kept") for one in rows)
    ring = [(one["bytes"] / unit, one["ratio"]) for one in rows if one["spec"].startswith("tidal")]
    for axes in (figure.axes[0] for figure in figures):
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 1]
        marks = [(line.get_ydata()[0], line.get_xdata()[0], line.get_markerfacecolor() != "white")
                 for line in lines if line.get_markersize() in (3.5, 6.5)]  # fmt: skip
        assert sorted(marks) == wanted
        sizes = [line.get_markersize() for line in lines]
        assert sizes.count(3.5) == sum(one["shown"] is None for one in rows)  # small: not judged
        rings = [line for line in lines if line.get_label() == "chosen"]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in rings] == ring


def test_the_front_line_is_what_nothing_cheaper_reaches() -> None:
    best = tune_module._best(ROWS)
    assert [best[0]["spec"], best[-1]["spec"]] == ["quest:budget=64", "quest:budget=1024"]


@pytest.mark.parametrize(("size", "unit"), [(2e9, "GB"), (2e3, "kB")])
def test_bytes_have_a_fitting_unit(size: float, unit: str) -> None:
    lines = printed(front_table(front_results(rows=[ROWS[0] | {"bytes": size}])))
    assert any(f"{unit} per" in line for line in lines)
    assert any(line.split()[:5] == ["quest", "1,024", "kept", "0.9808", "2"] for line in lines)
