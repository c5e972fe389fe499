"""Pictures of the README and of the pages: steps of a server against the context, answers and recalls of the demo."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from saccade.report import figures
from saccade.report.drawing import as_svg, canvas, headline
from saccade.report.labels import labelled
from saccade.report.palette import INK, SHADES, marks

from .page import Results, named
from .serving import points, policies, size, stock

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


def answers(results: Results) -> str:
    """SVG: the report's figure of right answers, of the demo."""
    return _alone(figures.accuracy(labelled(results)))


def recalls(results: Results) -> str:
    """SVG: the report's heat map of attention recall, of the demo."""
    return _alone(figures.recalls(labelled(results), "recall"))


def _alone(element: str) -> str:
    """An element of a page as a file of its own, in the colours of light paper."""
    for shade, (color, _) in SHADES.items():
        element = element.replace(f"var(--{shade})", color)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return element.replace("<svg", f"<svg {spaces}", 1)


def _panel(axes: Axes, results: Results, batch: int, chosen: list[str]) -> None:
    found = {
        context: rows
        for (context, rows_together), rows in sorted(points(results).items())
        if rows_together == batch and context >= SHORTEST
    }
    style: dict[str, Any] = {"linewidth": 1.6, "markersize": 4.5}
    axes.plot([*found], [stock(rows) for rows in found.values()], color=INK, label="stock vLLM", **style)
    drawn, names = marks(chosen), named(chosen)
    for policy in chosen:
        times = {context: rows[policy]["ms_per_token"] for context, rows in found.items() if policy in rows}
        label = names[policy].strip("`")
        axes.plot([*times], [*times.values()], **drawn[policy], label=label, **style)
    axes.set_title("one request" if batch == 1 else f"{batch} requests together")
    axes.set_xscale("log", base=2)
    axes.set_xticks([*found])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: size(int(tokens))))
    axes.set_xlabel("tokens in the cache")
    axes.set_ylim(bottom=0)
