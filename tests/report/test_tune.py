"""Table, page and pictures of `saccade tune`: the right figures, what decides first, and nothing fetched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from saccade.calibrate.standing import Standing
from saccade.report import tune as tune_module
from saccade.report.page import tune_page, tune_report
from saccade.report.table import WIDE
from saccade.report.tune import front_table, standing_table
from tables import cells, printed, said


def row(family: str, spec: str, size: float, correct: int, shown: float, status: str) -> dict[str, Any]:
    return {
        "family": family, "spec": spec, "bytes": size, "correct": correct, "n": 2400, "share_attended": 0.1,
        "ratio": correct / 2380, "kept": (correct - 1) / 2400, "shown": shown, "passed": status != "failed",
        "screened": None, "status": status,
    }  # fmt: skip


ROLES = "heads:0+" + "+".join(f"{layer}.{layer % 4}" for layer in range(1, 60))
ROWS = [
    row("quest", "quest:budget=1024", 8.0e6, 2378, 0.9921, "kept"),
    row("quest", "quest:budget=64", 6.5e6, 2000, 0.8123, "failed"),
    row("resa", "resa:ratio=0.25,min_pages=1", 8.4e6, 2300, 0.9512, "failed"),
    row("resa", "resa:ratio=0.125,min_pages=1", 7.2e6, 2380, 0.9934, "behind a failed one"),
    row("tidal:reselect=7", "tidal:budget=128,reselect=7", 7.1e6, 2381, 0.9945, "kept"),
    row(f"lychee_decode:roles={ROLES}", f"lychee_decode:budget=64,roles={ROLES}", 7.0e6, 5, 0.0, "failed"),
]  # fmt: skip


def front_results(**changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "task": "kv", "context": 2048, "seed": 0, "dtype": "float32", "questions": 2400, "texts": 200,
        "dense_bytes": 1.5 * max(row["bytes"] for row in changes.get("rows", ROWS)), "batch": 1, "dense_correct": 2380,
        "n": 2400, "quality": 0.99, "alpha": 0.05, "best_shown": 0.9951, "families": 4, "screened": None,
        "environment": {"device": "cpu"}, "rows": ROWS, "chosen": "tidal:budget=128,reselect=7", **changes,
    }  # fmt: skip


def test_the_front_says_what_was_shown_and_chosen() -> None:
    lines = cells(front_table(front_results()))
    assert ["quest", "1,024", "kept", "0.9921", "8", "0.9992", "2,378"] in lines
    assert ["64", "failed", "0.8123", "6.5", "0.8403", "2,000"] in lines
    early = [one | ({"n": 480, "correct": 20} if "budget=64" in one["spec"] else {}) for one in ROWS]
    assert any("20 of 480" in line for line in printed(front_table(front_results(rows=early))))
    assert ["ratio=0.125", "behind", "a", "failed", "one", "0.9934", "7.2", "1.0000", "2,380"] in lines
    assert ["tidal:reselect=7", "128", "kept,", "chosen", "0.9945", "7.1", "1.0004", "2,381"] in lines
    text = said(front_table(front_results()))
    assert "MB per" in text
    assert "dense attention 2,380/2,400" in text
    assert "ratio of accuracies, of what is chosen to dense attention, is at least 0.99, with 95% confidence" in text
    assert "all candidates of 4 families counted" in text
    assert "200 independent texts, 12 questions each, taken to fail together" in text
    assert "they show a ratio of 0.9951" in text
    assert "chosen, by bytes per token: tidal:budget=128,reselect=7" in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_long_family_has_a_short_name_and_is_told_whole_once(width: int) -> None:
    """And the table of candidates is no wider than 100 columns."""
    results = front_results(environment={"layers": 60, "kv_heads": 4})
    lines = printed(front_table(results), min(width, WIDE))
    text = "".join("".join(lines).split())
    assert text.count(ROLES) == 1 and f"lychee_decode:heads=63of240islychee_decode:roles={ROLES}" in text
    assert any(line.startswith("lychee_decode:heads=63 of 240   ") for line in lines) == (width >= WIDE)
    assert max(map(len, lines)) <= min(width, WIDE) <= 100


def test_what_is_known_so_far_has_a_line_per_family() -> None:
    ladders = {"quest": {"quest:budget=1024": 8.0, "quest:budget=64": 7.0}, "resa": {"resa:ratio=0.25": 9.0}}
    records = [("dense", 0, [1, 1, 0]), ("quest:budget=1024", 0, [1, 0, 0]), ("dense", 1, [1, 1, 1]),
               ("quest:budget=1024", 1, [1, 1, 0]), ("quest:budget=64", 2, [1, 1, 1])]  # fmt: skip
    standing = Standing()
    assert standing.rows() == []
    standing.families, standing.records = (
        ladders,
        {(number, spec): {"problem": number, "spec": spec, "right": right} for spec, number, right in records},
    )
    # Dense attention has not answered the third text yet.
    assert [(row["n"], row["ratio"]) for row in standing.rows()] == [(6, 3 / 5), (0, None), (0, None)]
    lines = cells(standing_table(standing.rows()))
    assert ["quest", "6", "1,024:", "0.600,", "64:", "-"] in lines
    assert ["resa", "0", "ratio=0.25:", "-"] in lines


def test_the_page_of_a_tuning_says_what_was_chosen_and_fetches_nothing(tmp_path: Path) -> None:
    results = screened_results(environment={"layers": 60, "kv_heads": 4, "device": "cpu"})
    path = tune_report(results, tmp_path)
    page = path.read_text(encoding="utf-8")
    assert path == tmp_path / "report.html" and page == tune_page(results)
    said = " ".join(re.sub("<[^>]*>", "", page).split())
    assert "Chosen: tidal:reselect=7 at 128. It was shown to answer at least 99.45% as often" in said
    headers = re.findall(r"<th[^>]*>([^<]*)</th>", page.split("</thead>")[0])
    assert headers[:5] == ["policy", "budget", "status", "ratio shown", "MB per token"]
    assert len(re.findall(r'<tr class="[^"]*chosen', page)) == 1
    assert f'title="lychee_decode:budget=64,roles={ROLES}"' in page and ">heads=63 of 240</span>" in page
    assert page.count("<svg") == 2
    assert not re.findall(r"""http|<script|@import|(?:src|href)="(?!#|data:)|url\((?!#)""", page)


def test_nothing_chosen_leaves_dense_attention(tmp_path: Path) -> None:
    rows = [one | {"status": "failed", "passed": False, "shown": 0.5} for one in ROWS]
    results = front_results(rows=rows, chosen=None)
    text = said(front_table(results))
    assert "nothing is shown to keep the promise: dense attention stays" in text
    assert "chosen" not in text.replace("of what is chosen to", "")
    assert tune_page(results).count("<svg") == 2


def test_measured_times_stand_beside_bytes(tmp_path: Path) -> None:
    times = {"dense": 9.25, "quest:budget=1024": 7.5, "tidal:budget=128,reselect=7": 8.0}
    results = front_results(ms_per_token=times, chosen="quest:budget=1024")
    lines = cells(front_table(results))
    assert ["quest", "1,024", "kept,", "chosen", "0.9921", "8", "7.50", "0.9992", "2,378"] in lines
    assert ["64", "failed", "0.8123", "6.5", "-", "0.8403", "2,000"] in lines
    text = said(front_table(results))
    assert "dense attention 9.25" in text
    assert "chosen, by measured time: quest:budget=1024" in text
    assert "is faster: dense attention stays" in said(front_table(results | {"chosen": None}))
    nothing = results | {"chosen": None, "ms_per_token": {"dense": 9.25}}
    assert "nothing is shown to keep the promise" in said(front_table(nothing))
    assert tune_page(results).count("<svg") == 2


@pytest.mark.parametrize(
    ("rows", "pictures"),
    [
        (ROWS, 2),
        (ROWS[:1], 1),
        ([one | {"ratio": 0.1, "shown": 0.05} for one in ROWS[:2]], 1),
        ([one | {"bytes": 3e9} for one in ROWS], 2),
    ],
    ids=["all", "one", "far below", "equal bytes"],
)
def test_the_front_is_drawn(
    rows: list[dict[str, Any]], pictures: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A mark for every candidate, filled if it kept the promise, and a ring around the chosen one; twice if near."""
    figures: list[Figure] = []
    monkeypatch.setattr(tune_module, "inline", lambda figure, name: figures.append(figure) or name)
    assert tune_module.front_pictures(front_results(rows=rows)) == [f"front-{place}" for place in range(pictures)]
    unit = 1e9 if rows[0]["bytes"] == 3e9 else 1e6
    wanted = sorted((one["ratio"], one["bytes"] / unit, one["status"] == "kept") for one in rows)
    ring = [(one["bytes"] / unit, one["ratio"]) for one in rows if one["spec"].startswith("tidal")]
    for axes in (figure.axes[0] for figure in figures):
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 1]
        marks = [(line.get_ydata()[0], line.get_xdata()[0], line.get_markerfacecolor() != "white")
                 for line in lines if line.get_markersize() == 6.5]  # fmt: skip
        assert sorted(marks) == wanted
        rings = [line for line in lines if line.get_label() == "chosen"]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in rings] == ring


def test_the_front_line_is_what_nothing_cheaper_reaches() -> None:
    best = tune_module._best(ROWS)
    assert [one["spec"] for one in best] == ["quest:budget=64", "tidal:budget=128,reselect=7"]


def screened_results(**changes: Any) -> dict[str, Any]:
    """Two families of four were judged, the others on 16 texts only."""
    rows = []
    for one in ROWS:
        unseen = {"shown": None, "passed": False, "correct": 180, "n": 192, "ratio": 0.9474, "kept": 0.9375}
        judged = one["family"].startswith(("quest", "tidal"))
        rows.append(one | {"screened": 0.9474} | ({} if judged else unseen | {"status": "screened out"}))
    screen = {"texts": list(range(0, 160, 10)), "families": 4, "wanted": 0.9945}
    return front_results(**{"rows": rows, "families": 2, "screened": screen, **changes})


def test_a_screen_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, text = cells(front_table(screened_results())), said(front_table(screened_results()))
    assert ["quest", "1,024", "kept", "0.9921", "8", "0.9992", "2,378"] in lines
    assert ["ratio=0.125", "screened", "out", "-", "7.2", "0.9474", "180", "of", "192"] in lines
    assert "all candidates of 2 families counted" in text
    assert "screened: 4 families on 16 other texts, for candidates with a ratio of 0.9945 or more; the 2 with" in text
    assert max(map(len, printed(front_table(screened_results()), 80))) <= 80
    figures: list[Figure] = []
    monkeypatch.setattr(tune_module, "inline", lambda figure, name: figures.append(figure) or name)
    assert "Small: screened, not judged" in tune_page(screened_results())
    assert "Small: screened" not in tune_page(front_results())
    sizes = [line.get_markersize() for line in figures[0].axes[0].get_lines() if len(line.get_xdata()) == 1]
    assert sizes.count(3.5) == sizes.count(6.5) == 3
    (step,) = (line for line in figures[0].axes[0].get_lines() if line.get_label() == "largest ratio for the bytes")
    assert 0.9474 not in step.get_ydata()  # of other texts, and of fewer


def test_where_a_screen_lets_nobody_through_it_is_told(tmp_path: Path) -> None:
    rows = [one | {"shown": None, "passed": False, "status": "screened out"} for one in screened_results()["rows"]]
    results = screened_results(rows=rows, families=0, best_shown=None, chosen=None, texts=16, n=192, dense_correct=190)
    text = said(front_table(results))
    assert "none had one, so that none was judged" in text and "independent texts" not in text
    assert "nothing is shown to keep the promise: dense attention stays" in text
    assert tune_page(results).count("<svg") == 2


@pytest.mark.parametrize(("size", "unit"), [(2e9, "GB"), (2e6, "MB"), (2e3, "kB")])
def test_bytes_have_a_fitting_unit(size: float, unit: str) -> None:
    lines = printed(front_table(front_results(rows=[ROWS[0] | {"bytes": size}])))
    assert any(f"{unit} per" in line for line in lines)
    assert any(line.split()[:5] == ["quest", "1,024", "kept", "0.9921", "2"] for line in lines)
