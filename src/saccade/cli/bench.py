"""`saccade bench`: timings, the baselines in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .group import need_eval
from .options import Device

bench = typer.Typer(no_args_is_help=True, help="Time decoding, with the baselines in the same run.")

DEFAULT_POLICIES = ["dense", "tidal", "less_is_more"]
SERVED_POLICIES = ["less_is_more", "quest"]

Shape = Annotated[
    str,
    typer.Option(metavar="NAME_OR_DIR", help="smollm2-135m, llama-3.2-1b, llama-3.1-8b, qwen3-8b, or a folder."),
]
Policies = Annotated[list[str], typer.Option(metavar="SPEC", help="Policy to time; give it once per policy.")]
Budgets = Annotated[str, typer.Option(metavar="N,N", help="Budgets for policies that have one and were not given one.")]
Batches = Annotated[str, typer.Option(metavar="N,N", help="Rows decoded together.")]
Steps = Annotated[int, typer.Option(min=2, help="Timed steps per variant.")]
RandomDtype = Annotated[str, typer.Option(help="float32, bfloat16, float16.")]
RowsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write rows and environment there.", show_default=False)
]


@bench.callback()
def _bench() -> None:
    """Time decoding, with the baselines in the same run."""


@bench.command()
def decode(
    shape: Shape = "smollm2-135m",
    context: Annotated[
        list[str], typer.Option(metavar="N,N", help="Cached tokens; 0 is the empty context, everything but the cache.")
    ] = ["0,4096,32768"],  # noqa: B006  # typer copies it
    batch: Annotated[list[str], typer.Option(metavar="N,N", help="Rows decoded together.")] = ["1"],  # noqa: B006
    threads: Annotated[
        list[str], typer.Option(metavar="N,N", help="CPU threads; one is steady on a shared machine.")
    ] = ["1"],  # noqa: B006
    policy: Policies = DEFAULT_POLICIES,
    budget: Annotated[
        list[str], typer.Option(metavar="N,N", help="Budgets for policies that have one and were not given one.")
    ] = ["2048"],  # noqa: B006
    steps: Steps = 12,
    baseline: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="Dense decoders beside ours: transformers, torch-sdpa, vllm; or none."),
    ] = ["transformers", "torch-sdpa", "vllm"],  # noqa: B006
    dtype: RandomDtype = "bfloat16",
    device: Device = "auto",
    json: RowsFile = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw it there.", show_default=False)] = None,
) -> None:
    """Time one decoded token on a cache of random keys, without prefill: dense decoders and policies in turns.

    Medians of interleaved steps, and where their time goes. The share of the ceiling is what the fastest dense decoder
    takes at an empty context, plus the cache bytes of the cost model at the read bandwidth measured in the same run,
    over the time measured. Lists repeat, or are joined by commas: every context with every batch and number of threads.

    Example:

      saccade bench decode --context 0,32768,131072 --threads 1 --policy tidal --policy quest --json bench.json
    """
    if picture is not None:
        need_eval("saccade bench decode --picture")
    # Imported here, so that --help does not wait for torch.
    from ..bench.job import BenchJob
    from ..bench.table import decode_table
    from ..eval.output import check_file, write_text
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
        baseline=baseline,
        dtype=dtype,
        device=device,
        json=json,
    )
    if picture is not None:
        check_file(picture)
    with progress(job.units) as advance:
        results = job.run(advance)
    if picture is not None:
        from ..report.decode import decode_picture

        write_text(picture, decode_picture(results))
    console = output()
    console.print(decode_table(results))
    for note in job.notes:
        console.print(note, highlight=False, soft_wrap=True)


@bench.command()
def serve(
    shape: Shape = "smollm2-135m",
    context: Annotated[str, typer.Option(metavar="N,N", help="Cached tokens of every row.")] = "8192,32768",
    batch: Batches = "1,4",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    policy: Policies = SERVED_POLICIES,
    budget: Budgets = "2048",
    steps: Steps = 12,
    block: Annotated[int, typer.Option(min=16, help="Tokens of a block of vLLM's cache.")] = 32,
    dtype: RandomDtype = "bfloat16",
    json: RowsFile = None,
) -> None:
    """Time one output token of vLLM on the CPU, stock and under policies in turns, on a cache of random keys.

    Nothing is prefilled: requests start with their blocks filled. The share of the ceiling is the time that the bytes
    of the cost model take at the bandwidth measured in the same run, on top of stock's time at an empty context.

    Example:

      saccade bench serve --context 8192,32768 --batch 1,4 --policy tidal --policy quest --json serve.json
    """
    from ..bench.serving import ServingJob
    from ..bench.table import serving_table
    from .terminal import output, progress, quiet_libraries

    quiet_libraries()
    job = ServingJob.check(
        shape=shape,
        contexts=context,
        batches=batch,
        threads=threads,
        policies=policy,
        budgets=budget,
        steps=steps,
        block=block,
        dtype=dtype,
        json=json,
    )
    with progress(job.units) as advance:
        results = job.run(advance)
    console = output()
    console.print(serving_table(results))
    for note in job.notes:
        console.print(note, highlight=False, soft_wrap=True)
