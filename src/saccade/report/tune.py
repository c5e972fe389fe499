"""Tables and pictures of `saccade tune`."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill as fill_text
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
from rich.table import Table

from .drawing import canvas, inline, with_intervals
from .labels import labelled, meanings
from .palette import FACT, INK, MUTED, Mark, marks
from .table import fill, new_table
from .wording import NOTHING, READ, Columns, Row, grouped, number, with_terms

ZOOM = 5
"""The second picture shows the wanted quality with so many times its distance from 1."""

WORDS = ("policy", "status")
"""Columns of candidates that hold words."""
KEPT = "the share of key tokens that keep dense attention's likeliest token, of the text as it is and repeated, is"
RATIOS = {"agreement": "agreement", "quality": "ratio of right answers"}
"""What is promised, by the option that asks for it."""


def front_rows(results: Mapping[str, Any]) -> list[Row]:
    """Candidates by family: its `label`, who is `first` there, everybody's `rung`, and whether it was chosen."""
    families = grouped(labelled(results), lambda row: str(row["family"]))
    return [
        {**row, "first": row is rows[0], "rung": _rung(row, rows), "chosen": row["spec"] == results["chosen"]}
        for rows in families.values()
        for row in rows
    ]


def front_columns(results: Mapping[str, Any]) -> Columns:
    """Headers, and what stands below them for a row of `front_rows`; what decides comes first."""
    unit, size = _unit(results["rows"])
    columns: dict[str, Callable[[Row], str]] = {
        # Once is enough.
        "policy": lambda row: row["label"] if row["first"] else "",
        "budget": lambda row: row["rung"],
        "status": lambda row: row["status"] + ", chosen" * row["chosen"],
        "at least": lambda row: number(row["shown"], "{:.4f}"),
        f"{unit} per token": lambda row: f"{row['bytes'] / size:,.4g}",
        "judged": lambda row: number(row["ratio"], "{:.4f}"),
        "searched": lambda row: f"{row['searched']:.4f}",
    }
    if any(row.get("accepted") is not None for row in results["rows"]):
        columns["accepted, served"] = lambda row: number(row["accepted"], "{:.4f}")
    # Bytes per token count the index too.
    return {name: cell for name, cell in with_terms(columns, results["rows"], "at least").items() if name != READ}


def front_table(results: Mapping[str, Any]) -> Table:
    """Every candidate, family by family; the promise and what was chosen below."""
    rows, columns = front_rows(results), front_columns(results)
    headers = [fill_text(name, 6, break_long_words=False) for name in columns]
    notes = [*meanings({row["family"]: row["label"] for row in rows}), *front_notes(results)]
    return fill(new_table(front_title(results), headers, WORDS, notes), rows, columns, "label", bold="chosen")


def front_title(results: Mapping[str, Any]) -> str:
    """What was tried, on what."""
    return (
        f"candidates that read less than dense attention: model {results['model']}, {results['read']}, context "
        f"{results['context']:,}, batch {results['batch']}"
    )


def front_notes(results: Mapping[str, Any]) -> list[str]:
    """What is promised, and what was chosen."""
    (unit, size), texts = _unit(results["rows"]), {name: len(found) for name, found in results["texts"].items()}
    kept = "right answers, over dense attention's, are" if results["measure"] == "quality" else KEPT
    notes = [
        f"{RATIOS[results['measure']]} with dense attention, on texts that judged and on those that searched before",
        f"promise: {kept} at least {results['wanted']:g}, with {1 - results['alpha']:.0%} confidence over texts",
        f"dense attention reads and writes {results['dense_bytes'] / size:,.4g} {unit} per token",
        f"{texts['searched']:,} texts chose who is judged, {texts['judged']:,} others judged, from the best candidate "
        f"down to the first that failed; without a loss these show {results['best_shown']:.4f}",
    ]
    notes += [f"left out: {line}" for line in results.get("left_out", ())]
    if results["best_shown"] < results["wanted"]:
        notes.append("that is less than the promise, so nobody was judged: more texts may show it")
    if results["n"]:
        judged = "right answers of dense attention" if results["measure"] == "quality" else "key tokens"
        notes.append(f"judged by {results['n']:,} {judged}")
    if results["chosen"] is None:
        return [*notes, "nothing is shown to keep the promise: dense attention stays"]
    return [*notes, f"chosen, by bytes per token: {results['chosen']}"]


def front_pictures(results: Mapping[str, Any]) -> list[str]:
    """Quality against bytes, as elements of a page: all candidates, and near the wanted one if some are far below."""
    rows, lowest = results["rows"], 1 - ZOOM * (1 - results["wanted"])
    near = [_ratio(row) for row in rows if _ratio(row) > lowest]
    ratio = RATIOS[results["measure"]]
    limits: dict[str, tuple[float, float] | None] = {"all candidates": None}
    if near and min(map(_shown, rows)) < lowest:
        limits[f"near the wanted {ratio}"] = lowest, max(1.0, *near) + 0.5 * (1 - results["wanted"])
    found = []
    for place, (title, limit) in enumerate(limits.items()):
        with canvas(6.4, 5.0, 9) as figure:
            axes = figure.add_subplot()
            _front(axes, results)
            axes.set(title=title, ylabel=f"{ratio} with dense attention", ylim=limit)
            figure.legend(loc="outside lower center", ncols=2, fontsize=8)
            found.append(inline(figure, f"front-{place}"))
    return found


def _front(axes: Axes, results: Mapping[str, Any]) -> None:
    """Candidates by family, the best ratio for the bytes, what is wanted, and what was chosen."""
    unit, size = _unit(results["rows"])
    families = grouped(front_rows(results), lambda row: str(row["label"]))
    drawn = marks(families)
    axes.axhline(1, color=MUTED, linewidth=1.2, label="dense attention")
    wanted, edge = results["wanted"], results["dense_bytes"] / size
    best = _best([row for row in results["rows"] if row["shown"] is not None] or results["rows"])
    axes.axhline(wanted, color=FACT, linestyle="dashed", linewidth=1, label=f"wanted: {wanted:g}")
    places, ratios = [row["bytes"] / size for row in best], [_ratio(row) for row in best]
    axes.step([*places, edge], [*ratios, ratios[-1]], where="post", color=INK, linewidth=1, alpha=0.45,
              label="best for the bytes")  # fmt: skip
    for label, rows in families.items():
        _family(axes, label, rows, drawn[label], size)
    for row in results["rows"]:
        if row["spec"] == results["chosen"]:
            axes.plot(row["bytes"] / size, _ratio(row), marker="o", markersize=15, markerfacecolor="none",
                      markeredgecolor=FACT, markeredgewidth=1.8, linestyle="none", label="chosen")  # fmt: skip
    axes.plot(edge, 1, marker="_", markersize=14, markeredgewidth=3, color=MUTED, linestyle="none")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"{unit} per token")


def _family(axes: Axes, label: str, rows: Sequence[Row], mark: Mark, size: float) -> None:
    """One family's candidates: filled if the promise is kept, hollow if not."""
    places, ratios = [row["bytes"] / size for row in rows], [_ratio(row) for row in rows]
    ends = [(_shown(row), _ratio(row)) for row in rows]
    with_intervals(axes, places, ratios, ends, mark, marker="none", linewidth=1, alpha=0.7)
    for row, place, ratio in zip(rows, places, ratios, strict=True):
        face = mark["color"] if row["status"] == "kept" else "white"
        width = 3.5 if row["shown"] is None else 6.5
        axes.plot(place, ratio, **mark, markerfacecolor=face, markersize=width, linestyle="")
    axes.plot([], [], **mark, markersize=6.5, linestyle="", label=label)


def _ratio(row: Row) -> float:
    """Of the texts that judged, or of those that searched where none did."""
    return float(row["searched"] if row["ratio"] is None else row["ratio"])


def _shown(row: Row) -> float:
    """What is shown of a candidate, or its ratio where no text judged it."""
    return _ratio(row) if row["shown"] is None else float(row["shown"])


def _best(rows: Sequence[Row]) -> list[Row]:
    """Candidates with a larger ratio than every cheaper one, cheapest first."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bytes"], -_ratio(row))):
        if not best or _ratio(row) > _ratio(best[-1]):
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
