"""Tables, pages and pictures of calibration and tuning: the right figures, valid SVG, the same for the same results."""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from printing import cells, kept_figures, printed, said
from saccade.eval.interval import wilson
from saccade.report import heads as head_module
from saccade.report import layers as layer_module
from saccade.report import tune as tune_module
from saccade.report.heads import head_picture, head_table
from saccade.report.layers import layer_picture, layer_table
from saccade.report.page import tune_page
from saccade.report.table import WIDE
from saccade.report.tune import front_table

LAYERS = 4

ABOUT = {"model": "tiny", "task": "kv", "context": 2048, "questions": 24, "seed": 0, "dtype": "float32", "texts": 2}


def drawn_twice(picture: Callable[[Any], str], results: Mapping[str, Any]) -> str:
    """The picture's text, after it was found valid and the same again."""
    text = picture(results)
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert picture(results) == text
    return text


def outcome(correct: int, n: int, recall: float, **names: Any) -> dict[str, Any]:
    return {
        **names,
        "correct": correct,
        "n": n,
        "accuracy": correct / n,
        "interval": wilson(correct, n),
        "recall": recall,
        "recall_with_dense": (1 + recall) / 2,
        "recall_per_layer": [None, *[recall] * (LAYERS - 1)],
        "share_attended": 0.25,
    }


DENSE = outcome(23, 24, 1.0, spec="dense")


def layer_results(budgets: tuple[int, ...] = (32, 64), candidates: int = 2, **changes: Any) -> dict[str, Any]:
    """A search over the last `candidates` layers; layer r loses 1 / (1 + r) nats, a tenth less at further budgets."""
    tried: list[list[int]] = [[], *([layer] for layer in range(LAYERS - candidates, LAYERS))]
    return {
        **ABOUT,
        "policy": "tidal",
        "budgets": list(budgets),
        "passages": 3,
        "tokens": 1024,
        "keys": 77,
        "walk": 32,
        "rows": [probed(reselect, b, 0.9**number) for reselect in tried for number, b in enumerate(budgets)],
        "chosen": tried[-1],
        "second": None,
        "margin": None,
        "further_layers": [],
        "notes": ["the note"],
        **changes,
    }


def probed(reselect: list[int], budget: int, factor: float = 1.0) -> dict[str, Any]:
    loss = {"natural": factor / (1 + sum(reselect)), "repeat": factor / (2 + sum(reselect))}
    merit = sum(loss.values())
    row = {"reselect": reselect, "budget": budget, "merit": merit, "interval": (merit - 0.1, merit + 0.2)}
    walked = {"walked": {"merit": 2 * merit}} if reselect else {}
    return {**row, "key_kl": loss, "key_equal": {"natural": 0.25, "repeat": None}, **walked}


def test_layers_have_losses_intervals_and_a_mark() -> None:
    table = layer_table(layer_results(second=[2], margin=(-0.05, 0.1)))
    lines = cells(table)
    assert ["none", "32", "1.000", "0.500", "1.500", *"1.400 to 1.700".split(), "0.25", "-", "-"] in lines
    assert ["3", "64", "0.225", "0.180", "0.405", *"0.305 to 0.605".split(), "0.25", "-", "0.810", "chosen"] in lines
    text = said(table)
    assert "tiny, 3 texts of 1,024 tokens, 77 key tokens" in text
    assert "chosen: layer 3" in text and "second: layer 2, worse by -0.050 to 0.100" in text and "the note" in text
    results = layer_results(budgets=(32,), dense=DENSE)
    for row in results["rows"]:
        row["asked"] = outcome(5 * sum(row["reselect"]), 24, 0.5)
    lines = cells(layer_table(results))
    assert "3 32 0.250 0.200 0.450 0.350 to 0.650 0.25 - 15 0.900 chosen".split() in lines
    assert "dense attention answers 23" in said(layer_table(results))
    results = layer_results(further_layers=[{"from": (3,), "to": (2, 3), "gain": (0.01, 0.2), "taken": True}])
    results["rows"] += [probed([2, 3], budget) for budget in (32, 64)]
    text = said(layer_table(results | {"chosen": [2, 3]}))
    assert "further layer: 3 -> 2+3, taken" in text and "chosen: layers 2+3" in text
    results["further_layers"][0] |= {"taken": False}
    assert "3 -> 2+3, not taken: it may gain nothing" in said(layer_table(results))


@pytest.mark.parametrize(
    "results",
    [
        layer_results(budgets=(32,), candidates=0),
        layer_results(chosen=[]),
        layer_results(budgets=(32, 64, 128, 256, 512, 1024)),
    ],
    ids=["no layer", "none chosen", "many budgets"],
)
def test_layers_are_drawn(results: dict[str, Any]) -> None:
    drawn_twice(layer_picture, results)
    assert sum(line[-1:] == ["chosen"] for line in cells(layer_table(results))) == len(results["budgets"])


@pytest.mark.parametrize(("layers", "named"), [(80, 81), (200, 101)])
def test_names_of_layers_have_room(layers: int, named: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of a large model has its name; of one that is too large some have, and the chosen one always."""
    figures = kept_figures(layer_module, monkeypatch)
    tried: list[list[int]] = [[], *([layer] for layer in range(layers))]
    layer_picture(layer_results(budgets=(32,), rows=[probed(one, 32) for one in tried], chosen=[3]))
    names = [label.get_text() for label in figures[0].axes[0].get_xticklabels()]
    assert "3" in names
    assert len(names) == named if layers < 100 else len(names) <= named + 1
    boxes = [label.get_window_extent() for label in figures[0].axes[0].get_xticklabels()]
    boxes.sort(key=lambda box: box.x0)
    assert all(right.x0 >= left.x0 + 0.6 * left.width for left, right in pairwise(boxes))


def head_results(methods: tuple[str, ...] = ("direct", "score")) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for method in methods:
        trained = method == "direct"
        kinds = ("threshold", "exact") if trained else ("exact",)
        roles = {kind: f"heads:0+1.{int(kind == 'exact')}" for kind in kinds}
        found.append({"method": method, "values": None, "roles": roles, "trace": trace(trained)})
        rows += [
            outcome(12 + number, 24, 0.5, method=method, roles=kind, budget=budget, heads=3 + (kind == "threshold"))
            for kind in kinds
            for number, budget in enumerate((64, 1024))
        ]
    kind, chosen = next(iter(found[0]["roles"].items()))
    return {
        **ABOUT, "target_heads": 3, "exact": False, "dense": DENSE, "found": found, "rows": rows,
        "chosen": chosen, "chosen_of": {"method": methods[0], "roles": kind}, "environment": {"kv_heads": 2},
    }  # fmt: skip


def trace(trained: bool) -> dict[str, Any] | None:
    """As a training gives it: no loss at first, and none that is seen at the step that begins as the teacher."""
    rest = {"loss": [None, 0.0, 3.0, 2.0], "expected_l0": [6, 6, 3, 2], "multiplier": [0, 0, 1, 2]}
    return {"step": [0, 1, 10, 20], **rest} if trained else None


def test_heads_have_answers_and_recall_by_method_roles_and_budget() -> None:
    lines, interval = cells(head_table(head_results())), "{:.2f}-{:.2f}".format(*wilson(12, 24))
    assert ["direct", "threshold", "4", "64", "12/24", interval, "0.500"] in lines
    assert ["score", "exact", "3", "64", "12/24", interval, "0.500"] in lines
    assert [line[3:5] for line in lines if line[:2] == ["direct", "exact"]] == [["64", "12/24"], ["1,024", "13/24"]]
    text = said(head_table(head_results()))
    assert "3 heads wanted, 24 questions in 2 texts; dense attention 23/24" in text
    assert "role file and recipe: direct, threshold: 4 heads" in text
    lines = printed(head_table(head_results()), 80)
    assert all(len(line) <= 80 for line in lines) and "…" not in "".join(lines)


@pytest.mark.parametrize(("methods", "panels"), [(("direct", "score"), 4), (("random",), 1)])
def test_heads_are_drawn(methods: tuple[str, ...], panels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training, its loss where there is one, beside the number that is wanted above layer 0."""
    results, figures = head_results(methods), kept_figures(head_module, monkeypatch)
    drawn_twice(head_picture, results)
    axes = figures[0].axes
    assert len(axes) == panels
    if panels > 1:
        loss, heads, multiplier = ([line.get_xydata().tolist() for line in one.lines] for one in axes[:3])
        assert loss == [[[10, 3], [20, 2]]] and multiplier == [[[0, 0], [1, 0], [10, 1], [20, 2]]]
        assert heads == [[[0, 6], [1, 6], [10, 3], [20, 2]], [[0, 1], [1, 1]]]


def test_no_last_bit_of_the_layout_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures would differ now and then: too rarely to be found by drawing twice."""
    figures = kept_figures(layer_module, monkeypatch)
    layer_picture(layer_results())
    edges = [value * 1e6 for axes in figures[0].axes for value in axes.get_position(original=True).extents]
    assert edges == pytest.approx([round(edge) for edge in edges], abs=1e-6)


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


def test_bytes_have_a_fitting_unit_and_the_front_is_what_nothing_cheaper_reaches() -> None:
    for size, unit in ((2e9, "GB"), (2e3, "kB")):
        lines = printed(front_table(front_results(rows=[ROWS[0] | {"bytes": size}])))
        assert any(f"{unit} per" in line for line in lines)
        assert any(line.split()[:5] == ["quest", "1,024", "kept", "0.9808", "2"] for line in lines)
    best = tune_module._best(ROWS)
    assert [best[0]["spec"], best[-1]["spec"]] == ["quest:budget=64", "quest:budget=1024"]


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
