"""Table and picture of `python -m benchmarks growth`."""

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import FuncFormatter
from rich.table import Table

from saccade.report.drawing import as_svg, canvas
from saccade.report.palette import marks
from saccade.report.table import new_table
from saccade.report.wording import NOTHING


def growth_table(results: Mapping[str, Any]) -> Table:
    """Microseconds per selection and nodes visited, a line per context; the fitted exponents below."""
    settings, here = results["settings"], results["environment"]
    names = settings["selectors"]
    title = (
        f"choosing {settings['budget']:,} tokens, one KV head of {settings['head_dim']}, {settings['group']} queries, "
        f"{here['dtype']}, {here['threads']} thread(s), {here['processor']}"
    )
    table = new_table(title, ["context", *(f"{name}\n{measure}" for measure in ("µs", "visited") for name in names)])
    found = {(row["context"], row["selector"]): row for row in results["rows"]}
    for context in dict.fromkeys(row["context"] for row in results["rows"]):
        own = [found.get((context, name)) for name in names]
        times = (NOTHING if row is None else f"{row['us']:,.0f}" for row in own)
        nodes = (NOTHING if row is None else f"{row['visited']:,.0f}" for row in own)
        table.add_row(f"{context:,}", *times, *nodes)
    table.add_section()
    fits = {fit["selector"]: fit for fit in results["exponents"]}
    exponents = (_exponent(fits.get(name), kind) for kind in ("time", "visited") for name in names)
    table.add_row("exponent", *exponents)
    return table


def growth_picture(results: Mapping[str, Any]) -> str:
    """Time and nodes against the context, both logarithmic, as SVG."""
    names = results["settings"]["selectors"]
    drawn = marks(names)
    with canvas(9.5, 4.2) as figure:
        panels = figure.subplots(1, 2)
        fits = {fit["selector"]: fit for fit in results["exponents"]}
        for axes, measure, kind in zip(panels, ("us", "visited"), ("time", "visited"), strict=True):
            for name in names:
                rows = [row for row in results["rows"] if row["selector"] == name]
                axes.plot(
                    [row["context"] for row in rows],
                    [row[measure] for row in rows],
                    **drawn[name],
                    markersize=5,
                    linewidth=1.2,
                    label=f"{name}: {_exponent(fits.get(name), kind)}",
                )
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _tokens(tokens)))
            axes.set_yscale("log")
            axes.set_xlabel("tokens in the cache")
            axes.legend(title="fitted exponent", fontsize=8)
        panels[0].set_title("µs per selection, median")
        panels[1].set_title("nodes visited per selection")
        return as_svg(figure)


def _tokens(count: float) -> str:
    """8K, 1M."""
    if count >= 2**20:
        return f"{count / 2**20:g}M"
    return f"{count / 2**10:g}K" if count >= 2**10 else f"{count:g}"


def _exponent(fit: Mapping[str, Any] | None, kind: str) -> str:
    if fit is None or fit[kind] is None:
        return NOTHING
    return f"{fit[kind]['slope']:.2f}±{fit[kind]['standard_error']:.2f}"
