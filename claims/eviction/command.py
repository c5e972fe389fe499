"""`python -m claims eviction`: saccade's policies beside kvpress's presses."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.group import INTERRUPTED
from saccade.cli.options import Model, Seed, count, words

PROMPTS, TEXTS, OURS, THEIRS = "prompts.jsonl", "texts.jsonl", "saccade.jsonl", "kvpress.jsonl"


def eviction(
    kvpress: Annotated[
        Path, words("PYTHON", "Python of the environment that has kvpress; claims/eviction/requirements.txt makes it.")
    ] = Path(".venv-kvpress/bin/python"),
    model: Model = None,
    policy: Annotated[
        list[str] | None, words("SPEC", "Policy without its budget; once per policy. Default: every method.")
    ] = None,
    budget: Annotated[str, words("N,N", "Tokens per layer and KV head.")] = "16,64,256",
    context: Annotated[int, count("Length of the contexts.", 1024, metavar="TOKENS")] = 8192,
    limit: Annotated[int, count("Questions in all, a dozen per context.", maximum=100_000)] = 48,
    output_dir: Annotated[
        Path | None, words("DIR", "What both sides exchange. Default: results/eviction-DATE-TIME.")
    ] = None,
    json: Annotated[Path, words("FILE", "Results file, overwritten.")] = Path("results/eviction.json"),
    seed: Seed = 0,
    threads: Annotated[int, count("CPU threads of both sides.", maximum=1024)] = 1,
) -> None:
    """Ask the same questions under saccade's policies and under kvpress's presses at the same budgets (float32, CPU).

    saccade writes prompts as token ids, kvpress reads them in its own environment and writes tokens back, both are
    judged by one rule. SnapKV, TOVA, KeyDiff, DecodingPress and DuoAttention; what cannot run is listed with kvpress's
    own words. The fairness of it is discussed in claims/eviction/__init__.py.

    Example:

      python -m claims eviction --kvpress .venv-kvpress/bin/python --json docs/results/eviction.json
    """
    # Imported here, so that --help and a mistyped option do not wait for torch.
    import torch

    from saccade.cli.terminal import output, quiet_libraries, say, until_stopped
    from saccade.eval.output import check_file, check_folder, write_json

    from .job import EvictionJob, EvictionSettings, ask_kvpress
    from .report import summary

    quiet_libraries()
    folder = output_dir or Path("results") / f"eviction-{datetime.now():%Y-%m-%d-%H%M%S}"
    settings = EvictionSettings(kvpress, model, tuple(policy or ()), budget, context, limit, seed, threads)
    job = EvictionJob.check(settings)
    check_folder(folder)
    json.parent.mkdir(parents=True, exist_ok=True)
    check_file(json)
    job.write_prompts(folder / PROMPTS, folder / TEXTS)
    torch.set_num_threads(threads)
    asking = job.asking(job.subject.load())

    def keep(complete: bool) -> dict[str, Any]:
        job.write_answers(folder / OURS, asking)
        return {"complete": complete}

    console = output()
    if not until_stopped(asking, keep)["complete"]:
        say(console, f"interrupted: what saccade's side has said until then is in {folder / OURS}")
        raise typer.Exit(INTERRUPTED)
    ask_kvpress(job, *(folder / name for name in (PROMPTS, TEXTS, THEIRS)))
    results = job.results(folder / OURS, folder / THEIRS)
    write_json(json, results)
    say(console, *summary(results))
