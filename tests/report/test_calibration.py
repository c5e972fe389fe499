"""Tables and pictures of calibration: the right figures, valid SVG, the same for the same results."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from printing import cells, kept_figures, printed, said
from saccade.eval.interval import wilson
from saccade.report import heads as head_module
from saccade.report import layers as layer_module
from saccade.report.heads import head_picture, head_table
from saccade.report.layers import layer_picture, layer_table

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
