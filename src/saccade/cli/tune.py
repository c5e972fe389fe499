"""`saccade tune`: the cheapest policy that keeps a model's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .calibrate import run_and_show
from .options import Device, Dtype, Model, OutputDir, RecipePath, Seed, Task, Threads, count, flag, number, words


def tune(
    model: Model = None,
    quality: Annotated[float, number("RATIO", "Least ratio of its accuracy to dense attention's.")] = 0.99,
    context: Annotated[
        int | None,
        count(
            "Length of the texts. Default: 32768, or what the model has room for; a task file has its own.",
            128,
            metavar="TOKENS",
        ),
    ] = None,
    task: Task = "kv",
    questions: Annotated[
        int | None,
        count("Questions in all, a dozen per text. Default: as many as the promise needs.", maximum=1_000_000),
    ] = None,
    policy: Annotated[
        list[str] | None,
        words(
            "SPEC",
            "A family of candidates, without a budget; once per family. Default: every method, with the layers "
            "and heads that calibration has found.",
        ),
    ] = None,
    budgets: Annotated[str | None, words("N,N", "Budgets in tokens. Default: a 4th to a 64th of the context.")] = None,
    batch: Annotated[int, count("Rows decoded together, for the bytes.")] = 1,
    measure: Annotated[bool, flag("--measure", "Choose by measured time per token instead of bytes.")] = False,
    full: Annotated[
        bool, flag("--full", "Ask everything of every candidate: no screen, and nobody is left out who cannot pass.")
    ] = False,
    output_dir: OutputDir = Path("results/tune"),
    recipe: RecipePath = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    threads: Threads = 1,
) -> None:
    """Find the cheapest policy that keeps the answers, and write it into a recipe that `--policy auto` takes.

    Some texts screen all candidates. Of those that lose little there, the two families with the cheapest go on, with
    two candidates each, and are judged on other texts. One keeps the promise if the ratio of its accuracy to dense
    attention's is at least --quality with 95% confidence, all that are judged counted and questions about one text
    taken to fail together; the cheapest of those is chosen. Up to two families are judged without a screen. Without a
    known re-selection layer, one is searched first. You get a table, the recipe, and a folder with `report.html`.

    Examples:

      saccade tune --context 2048

      saccade tune --model ./Qwen3-8B --quality 0.98 --policy less_is_more:reselect=12 --policy quest --measure
    """
    from ..calibrate.target import TargetSettings, default_context
    from ..calibrate.tune import TuneSettings, Tuning
    from ..report.page import tune_report
    from ..report.tune import front_table, standing_table
    from .terminal import output, quiet_libraries, say

    quiet_libraries()
    length = context or default_context(model)
    shared = TargetSettings(model, task, length, questions or 0, output_dir, recipe, device, dtype, seed, threads)
    settings = TuneSettings(shared, quality, tuple(policy or ()), budgets, batch, measure, full)
    tuning = Tuning.check(settings)
    say(output(), tuning.design)
    run_and_show(tuning, front_table, tune_report, lambda: standing_table(tuning.standing.rows()))
