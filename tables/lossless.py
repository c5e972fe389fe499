"""When lossless serving pays: a cycle's cost over the decoding steps that `saccade bench serve` has timed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from lab.markdown import table
from saccade.adapters.vllm.lossless import lengths
from saccade.methods.policy import Policy
from saccade.report.drawing import as_svg, canvas, headline
from saccade.report.palette import INK, marks

from .page import Results, told
from .serving import drifted, points, size, stock

DRAFTS = "less_is_more:budget=2048"
MOST = 8
"""As in `rectify=8:verify`."""
VERIFIES = 1.1
"""Dense steps that a dense pass over all drafts of a batch is taken for: 1.03 to 1.13 by its bytes and products."""
ACCEPTED = (0.8, 0.9, 0.95, 0.984)
"""Chances that a draft is accepted if those before it are."""
COUNTED = (
    "python -m benchmarks drafts --model models/qwen2.5-coder-1.5b --policy less_is_more:reselect=14 "
    "--budget 2048,512,1024,4096 --json drafts.json"
)


@dataclass(frozen=True, slots=True)
class Cycle:
    """Milliseconds of a dense and of a sparse decoding step at one context and batch."""

    dense: float
    sparse: float

    def gain(self, accepted: float, drafts: int) -> float:
        """Speed-up over dense steps with so many drafts a pass, each of which is accepted with this chance."""
        if not drafts:
            return 1.0
        gained = sum(accepted**number for number in range(drafts + 1))
        return gained * self.dense / (drafts * self.sparse + VERIFIES * self.dense)

    def best(self, accepted: float) -> int:
        """The number of drafts, of those that the scheduler chooses from, which gains most."""
        return max(lengths(MOST), key=lambda drafts: self.gain(accepted, drafts))


def cycles(results: Results) -> dict[str, Cycle]:
    """By context and batch, those left out that gain nothing at the largest of `ACCEPTED`, or whose stock drifted."""
    found = {
        f"{size(context)} × {batch}": Cycle(stock(rows), rows[DRAFTS]["ms_per_token"])
        for (context, batch), rows in points(results).items()
        if not drifted(rows)
    }
    return {name: one for name, one in found.items() if one.best(ACCEPTED[-1])}


def gains(results: Results, file: str) -> list[str]:
    """Speed-up over stock by the chance that a draft is accepted, the number of drafts in brackets."""
    body = [
        [name, *(f"{one.gain(at, one.best(at)):.2f} ({one.best(at)})" for at in ACCEPTED)]
        for name, one in cycles(results).items()
    ]
    steps = f"By arithmetic from steps of `{DRAFTS}` and stock, {results['shape']} with random weights"
    about = told(results["environment"], "python -m benchmarks tables", file)
    return [*table(["context × batch", *map(str, ACCEPTED)], body), "", f"{steps}, {about}"]


def chance(row: Mapping[str, Any]) -> float:
    """That a draft is accepted if those before it are, over all positions alike: accepted drafts by drafts judged."""
    reached: list[float] = row["by_position"]
    return sum(reached) / (1 + sum(reached[:-1]))


def _budget(engine: str) -> int:
    return Policy.from_spec(engine.removesuffix(", always")).budget or 0


def accepted(results: Results, file: str) -> list[str]:
    """Of always so many drafts the chance, and the share of all that are accepted with its interval."""
    context, found = results["settings"]["context"], dict[int, dict[str, str]]()
    for row in results["rows"]:
        if "accepted" in row:
            shown = "{:.3f}; {:.2f} ({:.2f} to {:.2f})".format(chance(row), row["accepted"], *row["interval"])
            found.setdefault(_budget(row["engine"]), {})[f"{row['kind']}, T = {row['temperature']:g}"] = shown
    body = [[f"{one:,}", f"{one / context:.1%}", *found[one].values()] for one in sorted(found)]
    lines = table(["budget", "of the cache", *next(iter(found.values()))], body)
    return [*lines, "", told(results["environment"], COUNTED, file)]


def rates(results: Results, file: str) -> list[str]:
    """Tokens per second of rows that decode together, how often stock's (the mean of first and last), tokens a step."""
    found = dict[str, dict[int, tuple[float, float]]]()
    for row in results["rows"]:
        if row.get("pace"):
            gained = sum(tokens for tokens, *_ in row["each"]) / (row["batch"] * row["steps"])
            found.setdefault(row["engine"], {})[row["batch"]] = row["pace"], gained
    first, *_, last = found.values()
    body = []
    for engine, paces in found.items():
        name = f"{_budget(engine):,}{engine.partition(':verify')[2]}" if "budget" in engine else engine
        cells = []
        for rows, (pace, gained) in paces.items():
            cells.append(f"{pace:,.0f} ({2 * pace / (first[rows][0] + last[rows][0]):.2f}; {gained:.1f})")
        body.append([name, *cells])
    lines = table(["budget", *(f"{rows} together" for rows in first)], body)
    return [*lines, "", told(results["environment"], COUNTED, file)]


def picture(results: Results) -> str:
    """SVG: the same against that chance, a line for every context and batch."""
    chances = numpy.linspace(0.5, 1, 101)
    found = cycles(results)
    drawn = marks(found)
    with canvas(7.5, 4.2) as figure:
        axes = figure.subplots()
        for name, one in found.items():
            curve = [one.gain(at, one.best(at)) for at in chances]
            axes.plot(chances, curve, **drawn[name], label=name, linewidth=1.6, markevery=10, markersize=4.5)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_xlabel("chance that a draft is accepted if those before it are")
        axes.set_ylabel("speed-up over stock vLLM")
        axes.legend(title="context × batch", loc="upper left")
        steps = f"{results['shape']}, one {results['environment']['device']}"
        headline(
            figure,
            f"best of {', '.join(map(str, lengths(MOST)))} drafts, by arithmetic from steps of {DRAFTS}, {steps}",
        )
        return as_svg(figure)
