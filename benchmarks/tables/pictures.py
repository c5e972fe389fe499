"""The README's picture: a decoding step against the context, stock vLLM and policies."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from saccade.report.drawing import as_svg, canvas, headline
from saccade.report.palette import INK, marks

from .page import Results
from .serving import name, points, policies, size, stock

BATCHES = (1, 4)
SHORTEST = 1024
"""Tokens from which a context is drawn: before, the model's weights are all there is to read."""


def step_times(results: Results) -> str:
    """SVG: milliseconds per decoding step at each batch size, a line for stock vLLM and for every policy."""
    chosen = policies(results)
    with canvas(9.5, 4.0) as figure:
        panels = figure.subplots(1, len(BATCHES))
        for axes, batch in zip(panels, BATCHES, strict=True):
            _panel(axes, results, batch, chosen)
        panels[0].set_ylabel("ms per decoding step")
        panels[-1].legend(loc="upper left")
        versions = sorted({engine["vllm"] for engine in results["engines"].values()})
        device = results["environment"]["device"]
        weights = f"{results['shape']} with random weights, {results['environment']['dtype']}"
        headline(figure, f"{weights}, one {device}, vLLM {versions[0]}")
        return as_svg(figure)


def _panel(axes: Axes, results: Results, batch: int, chosen: list[str]) -> None:
    found = {
        context: rows
        for (context, rows_together), rows in sorted(points(results).items())
        if rows_together == batch and context >= SHORTEST
    }
    style: dict[str, Any] = {"linewidth": 1.6, "markersize": 4.5}
    axes.plot([*found], [stock(rows) for rows in found.values()], color=INK, label="stock vLLM", **style)
    drawn = marks(chosen)
    for policy in chosen:
        times = {context: rows[policy]["ms_per_token"] for context, rows in found.items() if policy in rows}
        label = name(policy).replace("`", "")
        axes.plot([*times], [*times.values()], **drawn[policy].style, label=label, **style)
    axes.set_title("one request" if batch == 1 else f"{batch} requests together")
    axes.set_xscale("log", base=2)
    axes.set_xticks([*found])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: size(int(tokens))))
    axes.set_xlabel("tokens in the cache")
    axes.set_ylim(bottom=0)
