"""`saccade compare`: the main job."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from .group import INTERRUPTED
from .options import Device, Document, Dtype, Model, Seed, Threads, count, flag, words


def compare(
    model: Model = None,
    document: Document = None,
    task: Annotated[
        Path | None,
        words(
            "FILE",
            "A benchmark's rows instead of the built-in questions: ruler, as lm-evaluation-harness makes them, or "
            ".parquet or .jsonl with the columns context, question, answer_prefix, answer, max_new_tokens.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        words("NAME", "How the rows of --task are scored. Default: what their column metric or task says."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        words(
            "SPEC",
            "Policy to compare, name:key=value,key=value; once per policy. See `saccade policies`. Also auto, the "
            "path of a recipe, recipe:NAME. Default: every method, with what a recipe beside the model says.",
        ),
    ] = None,
    budget: Annotated[
        str,
        words(
            "N,N", "Budgets in tokens, for policies that have one and were not given one; too small for one: left out."
        ),
    ] = "64,256",
    context: Annotated[
        int, count("Length of the contexts taken from the built-in text, or of ruler's.", 1024, metavar="TOKENS")
    ] = 8192,
    limit: Annotated[int, count("Questions in all, a dozen per context.", maximum=100_000)] = 48,
    probe: Annotated[
        bool,
        flag(
            "--probe",
            "Also KL(dense to policy) of tokens that need the long text, in nats: the mean over texts' ends plus that "
            "over repeated passages, without rectification.",
        ),
    ] = False,
    output_dir: Annotated[
        Path | None,
        words("DIR", "Results folder; files of the same names are overwritten. Default: results/DATE-TIME."),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    threads: Threads = 1,
) -> None:
    """Ask a long document the same questions under every policy; compare answers and speed.

    Facts are hidden in a long text, by default the Python language reference. The text is read once with dense
    attention; questions and answers are then decoded under each policy, token by token. You get a table, and a folder
    with `report.html` (figures), `results.json`, `samples.jsonl` (every answer), `recall.jsonl` (both recalls of every
    answer token, layer by layer, over heads with a set) and `config.json`.

    Examples:

      saccade compare

      saccade compare --policy tidal:reselect=7 --policy tidal:reselect=7,heads=query --budget 8,32,128

      saccade compare --policy less_is_more:reselect=6 --policy less_is_more:reselect=7 --limit 96

      saccade compare --model ./Qwen3-0.6B --task ruler --budget 256 --limit 200

      saccade compare --model ./Qwen3-0.6B --document book.txt --budget 1024,4096 --threads 8
    """
    from ..eval.comparison import Comparison
    from ..eval.job import ComparisonJob, ComparisonSettings
    from ..eval.output import CONFIGURATION, REPORT, RESULTS, ResultsFolder, check_folder, write_json
    from ..report.page import comparison_report
    from ..report.table import WIDE, comparison_table
    from .terminal import output, quiet_libraries, show, until_stopped

    quiet_libraries()
    path = output_dir or Path("results") / f"{datetime.now():%Y-%m-%d-%H%M%S}"
    settings = ComparisonSettings(
        model, document, tuple(policy or ()), budget, context, limit, path, device, dtype, seed, threads,
        task=task, metric=metric, probe=probe,
    )  # fmt: skip
    job = ComparisonJob.check(settings)
    check_folder(path)
    loaded = job.subject.load()
    with ResultsFolder(path) as folder:
        environment = job.environment(loaded)
        write_json(path / CONFIGURATION, {**job.configuration(), "environment": environment}, indent=2)
        comparison = Comparison(loaded, job.subject.tokenizer, job.contexts, job.policies, folder, threads, probe)

        def so_far(complete: bool = True) -> dict[str, Any]:
            known = {"complete": complete, "rows": comparison.rows(), "notes": [*job.notes, *comparison.notes]}
            return {**known, "environment": environment}

        def keep(complete: bool) -> dict[str, Any]:
            results = so_far(complete)
            write_json(path / RESULTS, results, indent=2)
            comparison_report(path)
            return results

        results = until_stopped(comparison, keep, lambda: comparison_table(so_far(), output().width, brief=True))
    show(comparison_table(results, output().width), f"report: {path / REPORT}", widest=WIDE)
    if not results["complete"]:
        raise typer.Exit(INTERRUPTED)
