"""`saccade tune`: the cheapest policy that keeps what a model says."""

from pathlib import Path
from typing import Annotated

from .calibrate import run_and_show
from .options import Device, Dtype, Model, OutputDir, RecipePath, Seed, Texts, Threads, count, number, words


def tune(
    model: Model = None,
    texts: Texts = None,
    agreement: Annotated[
        float | None,
        number("SHARE", "Key tokens, at least, whose likeliest token stays dense attention's. Default: 0.95."),
    ] = None,
    context: Annotated[
        int | None,
        count("Length of the texts. Default: 4096, or what the model has; a task file has its own.", metavar="TOKENS"),
    ] = None,
    minutes: Annotated[float | None, number("N", "Take as many texts as fit, of those wanted.")] = None,
    task: Annotated[
        str | None,
        words(
            "FILE",
            "Judge by right answers: FILE.jsonl of objects with context, question and answer; or a benchmark's rows as "
            "`compare --task` takes them.",
        ),
    ] = None,
    quality: Annotated[
        float | None, number("RATIO", "With --task: least ratio of its right answers to dense attention's.")
    ] = None,
    acceptance: Annotated[
        list[Path] | None,
        words(
            "FILE",
            "What `saccade doctor --server URL --json FILE` wrote of a server of greedy requests; once per file. A "
            "policy whose first drafts were accepted too rarely is not tried.",
        ),
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
    output_dir: OutputDir = Path("results/tune"),
    recipe: RecipePath = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    threads: Threads = 1,
) -> None:
    """Find the cheapest policy that keeps what the model says, and write it into a recipe that `--policy auto` takes.

    Texts are read densely, and the model is told their last tokens under each candidate. A key token is one that needs
    a long context. A candidate keeps the promise if, with 95% confidence over texts, at least --agreement of key tokens
    keep dense attention's likeliest token. Some texts choose who is judged, others judge; the cheapest that keeps the
    promise is taken. Without a known re-selection layer, one is searched first. One text is timed before it starts. You
    get a table, the recipe, and a folder with `report.html`.

    Examples:

      saccade tune --minutes 5

      saccade tune --model ./Qwen3-8B --texts ./documents --context 16384

      saccade tune --model ./Qwen3-8B --task questions.jsonl --quality 0.98 --policy less_is_more:reselect=12
    """
    from ..calibrate.target import TargetSettings
    from ..calibrate.tune import TuneSettings, Tuning
    from ..eval.output import REPORT
    from ..report.page import tune_page
    from ..report.tune import front_table
    from .terminal import output, quiet_libraries, say

    quiet_libraries()
    shared = TargetSettings(model, task or "", context or 0, 0, output_dir, recipe, device, dtype, seed, threads)
    settings = TuneSettings(
        shared, tuple(policy or ()), budgets, batch, texts, agreement, quality, minutes, tuple(acceptance or ())
    )
    tuning = Tuning.check(settings).timed()
    say(output(), tuning.design)
    run_and_show(tuning, front_table, tune_page, REPORT)
