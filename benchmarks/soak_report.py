"""Tables and picture of `python -m benchmarks soak`."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from saccade.report.drawing import as_svg, canvas
from saccade.report.palette import MUTED, marks
from saccade.report.table import fill, new_table
from saccade.report.wording import NOTHING, Columns, number

MEGABYTE = 2**20

_ROWS = 8
_SMOOTH = 200
"""Steps that a line of the steadiness panels averages over."""


def soak_tables(results: Mapping[str, Any]) -> list[Table]:
    """Blocks of each policy (some of them), memory, and the drifts."""
    return [*(_blocks(one, _of(results, one)) for one in _labels(results)), _memory(results), _summary(results)]


def soak_picture(results: Mapping[str, Any]) -> str:
    """Step time, memory, hit rate and similarity over the decoded tokens, as SVG."""
    labels = _labels(results)
    drawn = marks(labels)
    with canvas(9.5, 7.2) as figure:
        (times, memory), (hits, similar) = figure.subplots(2, 2)
        for label in labels:
            rows = _of(results, label)
            steps, color = [row["step"] for row in rows], drawn[label]["color"]
            times.plot(steps, [row["ms"] for row in rows], color=color, label=label)
            times.fill_between(
                steps, [row["ms_fast"] for row in rows], [row["ms_slow"] for row in rows], color=color, alpha=0.15
            )
            for axes, measure in ((hits, "hit"), (similar, "jaccard")):
                series = results["steadiness"].get(label, {}).get(measure, [])
                _smooth(axes, series, color, label)
        control = _of(results, labels[0]) if labels else []
        times.plot(
            [row["step"] for row in control],
            [row["ms_control"] for row in control],
            color=MUTED,
            linestyle="dashed",
            label="control: the same stock step",
        )
        times.set_title("ms per sparse step: medians and quartiles of blocks")
        _memory_panel(memory, results["memory"])
        hits.set_title(f"window hit rate, w = {results['settings']['window']}")
        similar.set_title("Jaccard similarity to the step before")
        for axes in (times, memory, hits, similar):
            axes.set_xlabel("decoded tokens")
            axes.set_ylim(bottom=0)
        for axes in (hits, similar):
            axes.set_ylim(0, 1.03)
        times.legend(fontsize=8)
        return as_svg(figure)


def _memory_panel(axes: Axes, memory: Sequence[Mapping[str, Any]]) -> None:
    """Growth of the process since the first block, beside what caches and indexes explain."""
    axes.set_title("MB more than after the first block")
    known = [row for row in memory if row["resident_bytes"] is not None]
    if not known:
        return
    steps, first = [row["step"] for row in known], known[0]
    for names, label, style in (
        (("resident_bytes",), "process, resident", "solid"),
        (("kv_bytes", "index_bytes"), "keys, values, indexes", "dashed"),
        (("index_bytes",), "indexes", "dotted"),
    ):
        grown = [sum(row[name] - first[name] for name in names) / MEGABYTE for row in known]
        axes.plot(steps, grown, label=label, linestyle=style, linewidth=1.4)
    axes.legend(fontsize=8)


def _smooth(axes: Axes, series: Sequence[float], color: str, label: str) -> None:
    """Every step faintly, and means of `_SMOOTH` steps."""
    axes.plot(range(1, len(series) + 1), series, color=color, alpha=0.18, linewidth=0.4, rasterized=True)
    parts = [series[start : start + _SMOOTH] for start in range(0, len(series), _SMOOTH)]
    centers = [start * _SMOOTH + len(part) / 2 for start, part in enumerate(parts)]
    axes.plot(centers, [fmean(part) for part in parts], color=color, linewidth=1.4, label=label)


def _blocks(label: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns: Columns = {
        "decoded": lambda row: f"{row['step']:,}",
        "context": lambda row: f"{row['context']:,}",
        "ms per step": lambda row: f"{row['ms']:.2f}",
        "quartiles": lambda row: f"{row['ms_fast']:.2f} to {row['ms_slow']:.2f}",
        "dense pass ms": lambda row: number(row["ms_pass"], "{:.2f}"),
        "control ms": lambda row: f"{row['ms_control']:.2f}",
        "index / KV": lambda row: f"{row['index_bytes'] / row['kv_bytes']:.2%}",
        "index time": lambda row: f"{row['index_time_share']:.2%}",
    }
    return fill(new_table(label, columns, ("decoded",)), _some(rows), columns)


def _memory(results: Mapping[str, Any]) -> Table:
    columns = ("decoded", "process", "keys and values", "indexes", "the rest")
    table = new_table("memory, all policies together, MB", columns, columns[:1])
    for row in _some(results["memory"]):
        resident = row["resident_bytes"]
        rest = None if resident is None else resident - row["kv_bytes"] - row["index_bytes"]
        values = (resident, row["kv_bytes"], row["index_bytes"], rest)
        table.add_row(f"{row['step']:,}", *(NOTHING if v is None else f"{v / MEGABYTE:,.1f}" for v in values))
    return table


def _summary(results: Mapping[str, Any]) -> Table:
    title = "drift per 10,000 tokens of context (Theil-Sen, 95%), and steadiness of the sets"
    columns = ("policy", "step", "step / control", "dense pass", "expected bytes", "hit rate", "Jaccard")
    table = new_table(title, columns, columns[:1])
    for column in table.columns[1:5]:
        column.no_wrap = False  # slopes with their intervals are long
    for drift in results["drift"]:
        series = results["steadiness"].get(drift["policy"], {})
        means = (f"{fmean(series[name]):.3f}" if series.get(name) else NOTHING for name in ("hit", "jaccard"))
        slopes = (_slope(drift[name]) for name in ("ms", "controlled", "pass", "expected"))
        table.add_row(drift["policy"], *slopes, *means)
    return table


def _slope(slope: Mapping[str, float] | None) -> str:
    if slope is None:
        return NOTHING
    return f"{slope['slope']:+.1%} ({slope['low']:+.1%} to {slope['high']:+.1%})"


def _some(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most `_ROWS` rows, the last one among them."""
    step = max(-(-len(rows) // _ROWS), 1)
    return [row for place, row in enumerate(rows, 1) if place % step == 0 or place == len(rows)]


def _labels(results: Mapping[str, Any]) -> list[str]:
    return [drift["policy"] for drift in results["drift"]]


def _of(results: Mapping[str, Any], label: str) -> list[Mapping[str, Any]]:
    return [row for row in results["blocks"] if row["policy"] == label]
