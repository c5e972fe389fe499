"""`python -m claims accumulation`: what sparse decoding loses with the keys and values that it has written itself."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

from saccade.cli.options import Device, Dtype, Model, Seed, count, words

RESULTS, PICTURE = "results.json", "accumulation.svg"


def accumulation(
    model: Model = None,
    policy: Annotated[
        list[str] | None,
        words(
            "SPEC",
            "Policy without its budget, which is the kept share of a passage; once per policy. "
            "Default: resa, tidal, less_is_more.",
        ),
    ] = None,
    kept: Annotated[str, words("P,P", "Shares of the passage that are kept.")] = "0.2,0.1,0.05,0.02",
    every: Annotated[str, words("N,N", "Sparse steps between dense passes over them.")] = "16,32,64,128",
    lengths: Annotated[str, words("N,N", "Tokens that are read; all end at the same ones.")] = "2048,4096,8192",
    sources: Annotated[str, words("NAME,NAME", "Texts: reference, library, facts.")] = "reference,library,facts",
    passages: Annotated[int, count("Passages per source.")] = 8,
    sparse_only: Annotated[
        int, count("So many of them are also decoded from their first token on; slow.", minimum=0)
    ] = 2,
    batch: Annotated[int, count("Passages read together.")] = 24,
    output_dir: Annotated[
        Path | None, words("DIR", "Results folder; same files are replaced. Default: results/accumulation-DATE-TIME.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    threads: Annotated[int, count("CPU threads.", maximum=1024)] = 1,
) -> None:
    """Measure how errors accumulate while decoding sparsely, and what rectification makes good (ReSA, section 3.2).

    Held-out passages are read with their own tokens; judged are the predictions of the last 32: is the token among the
    three likeliest? The prompt is dense, the last tokens are decoded under a policy that keeps a share of the passage
    and rectifies every N steps. Beside it: decode-only (all keys and values dense), sparse-only (all tokens decoded
    sparsely, no rectification) and dense. You get a table per source, `results.json` and `accumulation.svg`.

    Examples:

      python -m claims accumulation

      python -m claims accumulation --policy resa:min_pages=1 --kept 0.05,0.02 --lengths 4096 --sparse-only 0
    """
    # Imported here, so that --help and a mistyped option do not wait for torch.
    import torch

    from lab.measuring import measure
    from saccade.cli.terminal import quiet_libraries
    from saccade.eval.output import check_folder

    from .job import AccumulationJob, AccumulationSettings
    from .report import accumulation_picture, accumulation_tables

    quiet_libraries()
    folder = output_dir or Path("results") / f"accumulation-{datetime.now():%Y-%m-%d-%H%M%S}"
    named = tuple(policy or ())
    settings = AccumulationSettings(
        model, named, kept, every, lengths, sources, passages, sparse_only, batch, folder, device, dtype, seed, threads
    )
    job = AccumulationJob.check(settings)
    check_folder(folder)
    torch.set_num_threads(threads)
    said, files = (*job.notes, f"picture: {folder / PICTURE}"), (folder / RESULTS, folder / PICTURE)
    measure(job.accumulation, job.results, files, accumulation_tables, accumulation_picture, lines=lambda results: said)
