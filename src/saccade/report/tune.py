"""Table and picture of `saccade tune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
from rich.table import Table
from rich.text import Text

from .drawing import as_svg, canvas, headline, write_picture
from .palette import FACT, INK, MUTED, Mark, marks
from .table import new_table
from .wording import NOTHING, Row, about, asked, grouped, number, short

PICTURE = "front.svg"
ZOOM = 5
"""The second panel shows the wanted quality with so many times its distance from 1."""

_NARROWEST = 18
"""Columns of a terminal that a family's name gets at least."""


def front_table(results: Mapping[str, Any]) -> Table:
    """Every candidate that was asked, family by family; the promise and what was chosen below."""
    times, unit, size = results.get("ms_per_token"), *_unit(results["rows"])
    screen = results["screened"]
    title = (
        f"candidates that read less than dense attention: {about(results)}, batch {results['batch']}, "
        f"{asked(results, results['n'], results['dense_correct'])}"
    )
    columns = ["family", "budget", f"right of\n{results['n']:,}", "ratio of\naccuracies", "kept", "ratio\nshown"]
    columns += ["ratio,\nscreened"] if screen else []
    columns += [f"{unit} per\ntoken", *(["ms per\ntoken"] if times else ()), "status"]
    table = new_table(title, columns, ("family", "status"), _notes(results))
    table.columns[0].min_width = _NARROWEST
    for family, rows in grouped(results["rows"], lambda row: str(row["family"])).items():
        table.add_section()
        for row in rows:
            chosen = row["spec"] == results["chosen"]
            named = ("ratio", "kept", "shown", *(["screened"] if screen else ()))
            shares = (number(row[name], "{:.4f}") for name in named)
            right = f"{row['correct']:,}" + f" of {row['n']:,}" * (row["n"] < results["n"])
            cells = [_rung(row, rows), right, *shares]
            cells += [f"{row['bytes'] / size:,.4g}", *([number(times.get(row["spec"]), "{:.2f}")] if times else ())]
            status = f"{row['status']}, chosen" if chosen else row["status"]
            # A family of learnt roles has a name of many lines; once is enough.
            label = Text(family if row is rows[0] else "")
            table.add_row(label, *cells, status, style="bold" if chosen else None)
    return table


def _notes(results: Mapping[str, Any]) -> list[str]:
    """What stands below the table."""
    times, (unit, size) = results.get("ms_per_token"), _unit(results["rows"])
    screen, judged = results["screened"], results["families"]
    notes = [
        f"promise: the ratio of accuracies, of what is chosen to dense attention, is at least {results['quality']:g}, "
        f"with {1 - results['alpha']:.0%} confidence, all candidates of {judged} families counted",
        "kept: the share of dense attention's right answers that a candidate gave too; nothing is promised of it",
        f"dense attention reads and writes {results['dense_bytes'] / size:,.4g} {unit} per token",
    ]
    if judged:
        notes.append(
            f"{results['texts']:,} independent texts, {results['n'] // results['texts']} questions each, taken to fail "
            f"together: without a loss they show a ratio of {results['best_shown']:.4f}"
        )
    if screen:
        went_on = f"the {judged} with the cheapest were judged" if judged else "none had one, so that none was judged"
        notes.append(
            f"screened: {screen['families']} families on {len(screen['texts'])} other texts, for candidates with a "
            f"ratio of {screen['wanted']:.4f} or more; {went_on}"
        )
    if times:
        notes.append(f"ms per token of what kept the promise; dense attention {times['dense']:.2f}")
    if results["chosen"] is not None:
        notes.append(f"chosen, by {'measured time' if times else 'bytes per token'}: {results['chosen']}")
    elif times and len(times) > 1:
        notes.append("nothing that keeps the promise is faster: dense attention stays")
    else:
        notes.append("nothing is shown to keep the promise: dense attention stays")
    return notes


def front_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Draw quality against bytes, of all candidates and again near the wanted quality; returns the picture's path."""
    rows, lowest = results["rows"], 1 - ZOOM * (1 - results["quality"])
    near = [row for row in rows if row["ratio"] > lowest]
    closer = bool(near) and min(_shown(row) for row in rows) < lowest
    with canvas(11.0 if closer else 7.5, 5.2) as figure:
        panels = figure.subplots(1, 2 if closer else 1, squeeze=False)[0]
        for axes in panels:
            _front(axes, results)
        if closer:
            panels[0].set_title("all candidates")
            panels[1].set_title("near the wanted ratio")
            panels[1].set_ylim(lowest, max(1.0, *(row["ratio"] for row in near)) + 0.5 * (1 - results["quality"]))
        panels[0].set_ylabel("ratio of accuracies, candidate to dense attention")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3 if closer else 2, fontsize=8)
        key = "filled: kept the promise; hollow: not; whiskers reach down to the ratio that is shown"
        key += "; small: screened, not judged" if results["screened"] else ""
        headline(figure, f"{about(results)}, batch {results['batch']}, {results['n']:,} questions\n{key}")
        return write_picture(folder / PICTURE, as_svg(figure))


def _front(axes: Axes, results: Mapping[str, Any]) -> None:
    """Candidates by family, the best ratio for the bytes, what is wanted, and what was chosen."""
    unit, size = _unit(results["rows"])
    families = grouped(results["rows"], lambda row: str(row["family"]))
    drawn = marks(families)
    axes.axhline(1, color=MUTED, linewidth=1.2, label="dense attention")
    wanted, edge, best = (
        results["quality"],
        results["dense_bytes"] / size,
        _best([row for row in results["rows"] if row["shown"] is not None] or results["rows"]),
    )
    axes.axhline(wanted, color=FACT, linestyle="dashed", linewidth=1, label=f"wanted: {wanted:g}")
    places, ratios = [row["bytes"] / size for row in best], [row["ratio"] for row in best]
    axes.step([*places, edge], [*ratios, ratios[-1]], where="post", color=INK, linewidth=1, alpha=0.45,
              label="largest ratio for the bytes")  # fmt: skip
    for family, rows in families.items():
        _family(axes, family, rows, drawn[family], size)
    for row in results["rows"]:
        if row["spec"] == results["chosen"]:
            axes.plot(row["bytes"] / size, row["ratio"], marker="o", markersize=15, markerfacecolor="none",
                      markeredgecolor=FACT, markeredgewidth=1.8, linestyle="none", label="chosen")  # fmt: skip
    axes.plot(edge, 1, marker="_", markersize=14, markeredgewidth=3, color=MUTED, linestyle="none")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"{unit} per token")


def _family(axes: Axes, family: str, rows: Sequence[Row], mark: Mark, size: float) -> None:
    """One family's candidates: filled if the promise is kept, hollow if not."""
    places, ratios = [row["bytes"] / size for row in rows], [row["ratio"] for row in rows]
    whiskers = [[max(row["ratio"] - _shown(row), 0.0) for row in rows], [0.0] * len(rows)]
    axes.errorbar(places, ratios, yerr=whiskers, color=mark.color, linestyle="none", linewidth=1, alpha=0.7)
    for row, place, ratio in zip(rows, places, ratios, strict=True):
        face = mark.color if row["status"] == "kept" else "white"
        width = 3.5 if row["shown"] is None else 6.5
        axes.plot(place, ratio, **mark.style, markerfacecolor=face, markersize=width, linestyle="")
    axes.plot([], [], **mark.style, markersize=6.5, linestyle="", label=short(family))


def _shown(row: Row) -> float:
    """What is shown of a candidate, or its ratio where no text judged it."""
    return float(row["ratio"] if row["shown"] is None else row["shown"])


def _best(rows: Sequence[Row]) -> list[Row]:
    """Candidates with a larger ratio than every cheaper one, cheapest first."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bytes"], -row["ratio"])):
        if not best or row["ratio"] > best[-1]["ratio"]:
            best.append(row)
    return best


def _rung(row: Row, rows: Sequence[Row]) -> str:
    """What tells a candidate from the others of its family: a budget, or other options."""
    given = [other["spec"].partition(":")[2].split(",") for other in rows]
    known = {*row["family"].partition(":")[2].split(","), *(set.intersection(*map(set, given)) if rows[1:] else ())}
    own = [option for option in row["spec"].partition(":")[2].split(",") if option not in known]
    if len(own) == 1 and own[0].startswith("budget="):
        return f"{int(own[0].removeprefix('budget=')):,}"
    return "\n".join(own) or NOTHING


def _unit(rows: Sequence[Row]) -> tuple[str, float]:
    """In what bytes are said, so that the largest has one to three digits before the point."""
    largest = max(row["bytes"] for row in rows)
    return ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6) if largest >= 1e6 else ("kB", 1e3)
