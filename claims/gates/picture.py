"""Picture of the trial."""

from saccade.report.drawing import as_svg, canvas
from saccade.report.palette import INK, marks
from saccade.report.wording import grouped

from .table import Results, per_loss
from .variants import VARIANTS


def trial_picture(results: Results) -> str:
    """Expected number of open gates, multiplier and loss over steps, as SVG: a row per variant, a line per seed."""
    runs = grouped(results["runs"], lambda run: str(run["variant"]))
    seeds = marks(str(run["seed"]) for run in results["runs"])
    with canvas(11.0, 1.9 * max(len(runs), 1) + 0.3, font=8.5) as figure:
        panels = figure.subplots(max(len(runs), 1), 3, squeeze=False, sharex=True, sharey="col")
        for line, (name, own) in zip(panels, runs.items(), strict=False):
            for run in own:
                trace = run["trace"]
                known = [place for place, loss in enumerate(trace["loss"]) if loss]
                drawn = (
                    (trace["step"], trace["expected_l0"]),
                    (trace["step"], per_loss(run)),
                    ([trace["step"][place] for place in known], [trace["loss"][place] for place in known]),
                )
                for axes, points in zip(line, drawn, strict=True):
                    style = {"color": seeds[str(run["seed"])]["color"], "linewidth": 0.9, "alpha": 0.85}
                    axes.plot(*points, label=f"seed {run['seed']}", **style)
            line[0].axhline(results["target"], color=INK, linestyle="dashed", linewidth=1)
            titles = ("E‖z‖₀", "multiplier, per unit of the loss", "distillation loss")
            for axes, title in zip(line, titles, strict=True):
                axes.set_title(f"{_named(name)}: {title}")
        for line in panels:
            line[0].set_ylim(bottom=0)
            line[1].set_yscale("symlog", linthresh=1.0)
            line[1].set_ylim(bottom=0)
            line[2].set_yscale("log")
        for axes in panels[-1]:
            axes.set_xlabel("step")
        if runs:
            panels[0][0].legend(fontsize=7.5)
        return as_svg(figure)


def _named(variant: str) -> str:
    own = VARIANTS[variant]
    return own.kind if own.kind == variant else f"{own.kind}, {variant}"
