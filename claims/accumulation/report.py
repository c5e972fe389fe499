"""Table and picture of the accumulation experiment."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from rich.text import Text

from saccade.report.drawing import as_svg, canvas, side_by_side, with_intervals
from saccade.report.palette import INK, MUTED, marks
from saccade.report.table import new_table
from saccade.report.wording import NOTHING, Row, number


def accumulation_tables(results: Mapping[str, Any]) -> list[Table]:
    """A table per source."""
    return [_table(results, source) for source in _unique(results["rows"], "source")]


def _table(results: Mapping[str, Any], source: str) -> Table:
    """Top-3 accuracy of one source: that of dense, and what every setting has more or less than it on its passages."""
    rows = [row for row in results["rows"] if row["source"] == source]
    settings = _settings(rows)
    counts = sorted({row["passages"] for row in rows})
    passages = " or ".join(map(str, counts))
    table = new_table(
        f"{source}: top-3 accuracy on the last {results['targets']} tokens of {passages} passages, "
        "and differences to dense in points",
        ("length", "policy", "kept", "read", "dense", *settings),
        words=("policy",),
        notes=["* the 95% interval of the difference, by passage, leaves out 0"],
    )
    found = {_key(row): row for row in rows}
    previous = None
    for length, policy, kept in dict.fromkeys(_key(row)[:3] for row in rows if row["kept"] is not None):
        if previous not in (None, (length, policy)):
            table.add_section()
        previous = (length, policy)
        own = [found.get((length, policy, kept, setting)) for setting in settings]
        dense = found.get((length, "dense", None, "dense"))
        share = next((row["share_attended"] for row in own if row is not None), None)
        accuracy = None if dense is None else dense["accuracy"]
        cells = (f"{length:,}", policy, f"{kept:g}", number(share, "{:.1%}"), number(accuracy, "{:.1%}"))
        table.add_row(*map(Text, (*cells, *map(_cell, own))))
    return table


def accumulation_picture(results: Mapping[str, Any]) -> str:
    """Difference to dense at the longest length, as SVG: a row of panels per source, a column per policy."""
    rows = [row for row in results["rows"] if row["difference"] is not None and row["kept"] is not None]
    sources, policies = _unique(rows, "source"), _unique(rows, "policy")
    width, height = 3.6 * max(len(policies), 1) + 1.2, 2.5 * max(len(sources), 1) + 0.8
    with canvas(width, height) as figure:
        panels = figure.subplots(max(len(sources), 1), max(len(policies), 1), squeeze=False, sharex=True, sharey="row")
        longest = max((row["length"] for row in rows), default=0)
        shares, settings = _unique(rows, "kept"), _settings(rows)
        for line, source in enumerate(sources):
            for column, policy in enumerate(policies):
                axes = panels[line][column]
                own = [
                    row for row in rows if (row["source"], row["policy"], row["length"]) == (source, policy, longest)
                ]
                _panel(axes, own, shares, settings)
                axes.set_title(f"{policy}, {source}")
        for axes in panels[:, 0]:
            axes.set_ylabel("points above dense")
        figure.suptitle(f"top-3 accuracy on the last tokens of {longest:,}, against dense", color=INK)
        handles, labels = panels[0][0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside right upper", title="kept share")
        return as_svg(figure)


def _panel(axes: Axes, rows: Sequence[Row], shares: Sequence[float], settings: Sequence[str]) -> None:
    drawn = marks([f"{share:g}" for share in shares])
    axes.axhline(0, color=MUTED, linewidth=1, linestyle="dashed")
    for place, share in enumerate(shares):
        own = sorted((row for row in rows if row["kept"] == share), key=lambda row: settings.index(row["setting"]))
        shift = side_by_side(place, len(shares), apart=0.14)
        with_intervals(
            axes,
            [settings.index(row["setting"]) + shift for row in own],
            [100 * row["difference"] for row in own],
            [[100 * end for end in row["difference_interval"] or [row["difference"]] * 2] for row in own],
            drawn[f"{share:g}"],
            markersize=4.5,
            linestyle="-",
            linewidth=1,
            capsize=2,
            label=f"{share:g}",
        )
    axes.set_xticks(range(len(settings)), [setting.replace("-", "\n").replace(" ", "\n") for setting in settings])
    axes.yaxis.set_major_locator(MaxNLocator(6))


def _cell(row: Row | None) -> str:
    if row is None or row["difference"] is None:
        return NOTHING
    interval = row["difference_interval"]
    differs = interval is not None and not interval[0] <= 0 <= interval[1]
    return f"{100 * row['difference']:+.1f}{'*' if differs else ' '}"


def _key(row: Row) -> tuple[int, str, float | None, str]:
    return row["length"], row["policy"], row["kept"], row["setting"]


def _settings(rows: Sequence[Row]) -> list[str]:
    """The settings but dense, in the order in which more of the cache is written by sparse steps."""
    found = [setting for setting in _unique(rows, "setting") if setting != "dense"]
    return sorted(found, key=lambda name: (name == "sparse-only", int(name.rpartition(" ")[2]) if " " in name else 0))


def _unique(rows: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))
