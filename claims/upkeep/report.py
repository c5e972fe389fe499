"""Tables and picture of the upkeep experiment."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from saccade.report.drawing import as_svg, canvas
from saccade.report.palette import marks
from saccade.report.table import new_table
from saccade.report.wording import NOTHING, Row, grouped, number

_SHOWN = 5
"""Lengths in a table: the first, and such as double up to the last one."""
_STYLES = {"": "-", "position": ":", "query": "--"}
_ANEW = "rebuilt"
"""How names begin that are drawn as marks: they lie on the lines of indexes that were kept up."""


def upkeep_tables(results: Mapping[str, Any]) -> list[Table]:
    """Both recalls of every variant at some lengths, a table per budget."""
    return [_table(results, budget, rows) for budget, rows in _by_budget(results).items()]


def difference_lines(results: Mapping[str, Any]) -> list[str]:
    """A line for every difference between an index kept up and one built anew."""
    return [
        f"budget {row['budget']:,}, largest difference of {row['of']} to {row['to']}, any text and length: "
        f"attention recall {row['attention']:+.3f}, token recall {row['token']:+.3f}"
        for row in results["differences"]
    ]


def upkeep_picture(results: Mapping[str, Any]) -> str:
    """Both recalls against the decoded length, as SVG: a row of two panels per budget."""
    budgets = _by_budget(results)
    names = list(dict.fromkeys(row["variant"] for row in results["rows"]))
    drawn = marks(name.partition("/")[0] for name in names)
    with canvas(9.5, 3.6 * max(len(budgets), 1) + 0.4) as figure:
        panels = figure.subplots(max(len(budgets), 1), 2, squeeze=False, sharex=True)
        for line, (budget, rows) in zip(panels, budgets.items(), strict=False):
            for axes, measure in zip(line, ("attention", "token"), strict=True):
                for name, own in grouped(rows, lambda row: str(row["variant"])).items():
                    base, _, order = name.partition("/")
                    lengths, values = ([row[key] for row in own] for key in ("decoded", measure))
                    if base.startswith(_ANEW):
                        style = {**drawn[base], "linestyle": "none", "markersize": 4, "markerfacecolor": "none"}
                    else:
                        width = 1.1 if order else 1.6
                        style = {"color": drawn[base]["color"], "linestyle": _STYLES[order], "linewidth": width}
                    axes.plot(lengths, values, label=name, **style)
                axes.set_title(f"{measure} recall, budget {budget:,}")
                axes.set_ylim(bottom=0)
        for axes in panels[-1]:
            axes.set_xlabel("decoded tokens")
        handles, labels = panels[0][0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside right upper")
        return as_svg(figure)


def _table(results: Mapping[str, Any], budget: int, rows: Sequence[Row]) -> Table:
    lengths = _some(sorted({row["decoded"] for row in rows}))
    texts = max(row["texts"] for row in rows)
    table = new_table(
        f"budget {budget:,}: attention recall / token recall after so many decoded tokens, {texts} texts, "
        f"model {results['model']}",
        ("index", *(f"{length:,}" for length in lengths), "largest cluster"),
        words=("index",),
        notes=["largest cluster: share of all chunks in one cluster of a head, at most, at the last length"],
    )
    for name, own in grouped(rows, lambda row: str(row["variant"])).items():
        found = {row["decoded"]: row for row in own}
        cells = [_cell(found.get(length)) for length in lengths]
        largest = found[max(found)]["largest_cluster"]
        table.add_row(*map(Text, (name, *cells, number(largest, "{:.1%}"))))
    return table


def _cell(row: Row | None) -> str:
    return NOTHING if row is None else f"{row['attention']:.3f} / {row['token']:.3f}"


def _some(lengths: Sequence[int]) -> list[int]:
    """The first length and at most `_SHOWN - 1` more, each about half of the next one."""
    places, place = {0}, len(lengths) - 1
    while place > 0 and len(places) < _SHOWN:
        places.add(place)
        place //= 2
    return [lengths[place] for place in sorted(places)]


def _by_budget(results: Mapping[str, Any]) -> dict[int, list[Row]]:
    return grouped(results["rows"], lambda row: int(row["budget"]))
