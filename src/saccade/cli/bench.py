"""`saccade bench`: timings on synthetic caches, the baselines in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Device

bench = typer.Typer(no_args_is_help=True, help="Time decoding on synthetic caches, with the baselines in the same run.")

DEFAULT_POLICIES = ["dense", "tidal", "less_is_more"]


@bench.callback()
def _bench() -> None:
    """Time decoding on synthetic caches, with the baselines in the same run."""


@bench.command()
def decode(
    shape: Annotated[
        str,
        typer.Option(metavar="NAME_OR_DIR", help="smollm2-135m, llama-3.2-1b, llama-3.1-8b, qwen3-8b, or a folder."),
    ] = "smollm2-135m",
    context: Annotated[
        str, typer.Option(metavar="N,N", help="Cached tokens; 0 is the empty context, everything but the cache.")
    ] = "0,4096,32768",
    batch: Annotated[str, typer.Option(metavar="N,N", help="Rows decoded together.")] = "1",
    threads: Annotated[str, typer.Option(metavar="N,N", help="CPU threads; one is steady on a shared machine.")] = "1",
    policy: Annotated[
        list[str], typer.Option(metavar="SPEC", help="Policy to time; give it once per policy.")
    ] = DEFAULT_POLICIES,
    budget: Annotated[
        str, typer.Option(metavar="N,N", help="Budgets for policies that have one and were not given one.")
    ] = "2048",
    steps: Annotated[int, typer.Option(min=2, help="Timed steps per variant.")] = 12,
    stock: Annotated[bool, typer.Option(help="Time stock transformers too.")] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "bfloat16",
    device: Device = "auto",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write rows and environment there.", show_default=False)
    ] = None,
) -> None:
    """Time one decoded token on a cache of random keys, without prefill: stock transformers and policies in turns.

    Medians of interleaved steps. Lists repeat: every context with every batch and number of threads.

    Example:

      saccade bench decode --context 0,32768,131072 --threads 1,2 --policy dense --policy tidal --json bench.json
    """
    # Imported here, so that --help does not wait for torch.
    from ..bench.job import BenchJob
    from ..bench.table import decode_table
    from .terminal import output, progress, quiet_libraries

    quiet_libraries()
    job = BenchJob.check(
        shape=shape,
        contexts=context,
        batches=batch,
        threads=threads,
        policies=policy,
        budgets=budget,
        steps=steps,
        stock=stock,
        dtype=dtype,
        device=device,
        json=json,
    )
    with progress(job.units) as advance:
        results = job.run(advance)
    console = output()
    console.print(decode_table(results))
    for note in job.notes:
        console.print(note, highlight=False, soft_wrap=True)
