"""Picture of `saccade bench decode`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from .drawing import as_svg, canvas, name_lines, number_places
from .labels import renamed
from .palette import MUTED, marks
from .wording import Row, grouped

_SHADES = {
    "other": "#cbd5dc", "attention": "#0072b2", "selection": "#e69f00", "index": "#009e73", "rectify": "#cc79a7"
}  # fmt: skip


def decode_picture(results: Mapping[str, Any]) -> str:
    """Time per token against the context, and its parts at the longest one, as SVG: a line of panels per setting."""
    rows, _ = renamed(results["rows"])
    settings = grouped(rows, lambda row: (row["batch"], row["threads"]))
    with canvas(12.0, 5.6 * len(settings)) as figure:
        panels = figure.subplots(len(settings), 2, squeeze=False)
        for ((batch, threads), own), (left, right) in zip(settings.items(), panels, strict=True):
            _against_context(left, own)
            _parts(right, own)
            left.set_title(f"batch {batch}, {threads} thread(s): milliseconds per token, lower is better")
        here = results["environment"]
        made = f"{results['shape']}, {here['dtype']}, {here['processor']}, {here['date'][:10]}"
        figure.supxlabel(made, fontsize=8.5, color=MUTED)
        return as_svg(figure)


def _name(row: Row) -> str:
    if row["policy"] == "stock":
        return "stock transformers"
    return f"dense ({row['runtime']})" if row["policy"] == "dense" else str(row["policy"])


def _against_context(axes: Axes, rows: list[Row]) -> None:
    contexts = sorted({row["context"] for row in rows})
    lines = grouped(rows, _name)
    drawn = marks(lines)
    for name, own in lines.items():
        line = sorted((row["context"], row["ms_per_token"]) for row in own)
        places, times = [contexts.index(context) for context, _ in line], [milliseconds for _, milliseconds in line]
        dashes = "--" if name.startswith(("dense", "stock")) else "-"
        axes.plot(places, times, **drawn[name].style, markersize=5, linestyle=dashes, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    number_places(axes, contexts)
    axes.set_xlabel("tokens in the cache")
    axes.legend(fontsize=7.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _parts(axes: Axes, rows: list[Row]) -> None:
    longest = max(row["context"] for row in rows)
    # Others' dense attention would leave no width for ours.
    own = [row for row in rows if row["runtime"] == "saccade" and row["ms_other"] is not None]
    shown = [row for row in own if row["context"] == longest]
    shown.sort(key=lambda row: -row["ms_per_token"])
    for place, row in enumerate(shown):
        left = 0.0
        for part, shade in _SHADES.items():
            width = row[f"ms_{part}"]
            axes.barh(place, width, left=left, color=shade, label=part if place == 0 else None)
            left += width
        axes.plot([row["ideal_ms"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
    name_lines(axes, [_name(row) for row in shown])
    axes.set_title(f"where it goes at {longest:,} tokens; black: the ceiling")
    axes.set_xlabel("milliseconds per token")
    if shown:
        axes.legend(fontsize=8)
