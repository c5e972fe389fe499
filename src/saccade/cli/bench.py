"""`saccade bench`: timings, the baselines in the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from .group import INTERRUPTED
from .options import Device, Dtype, Model, Seed

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
def kernels(
    shape: Shape = "llama-3.1-8b",
    context: Annotated[list[str], typer.Option(metavar="N,N", help="Cached tokens per row.")] = ["32768,131072"],  # noqa: B006
    batch: Annotated[list[str], typer.Option(metavar="N,N", help="Rows.")] = ["1"],  # noqa: B006
    threads: Annotated[list[str], typer.Option(metavar="N,N", help="CPU threads.")] = ["1"],  # noqa: B006
    operation: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Operation; give it once per operation. Default: all.", show_default=False),
    ] = None,
    implementation: Annotated[
        list[str], typer.Option(metavar="NAME", help="auto, native, cpu, triton, reference; left out where refused.")
    ] = ["auto"],  # noqa: B006
    budget: Annotated[int, typer.Option(min=16, help="Tokens of a set.")] = 2048,
    rounds: Annotated[int, typer.Option(min=2, help="Timed calls of each operation.")] = 15,
    dtype: RandomDtype = "bfloat16",
    device: Device = "auto",
    json: RowsFile = None,
) -> None:
    """Time single operations on one layer's cache of random keys: attention, scores, top-k, page bounds, selections.

    Calls take turns and go round in several caches, so that none is warm; each result is first compared with float64.

    Example:

      saccade bench kernels --shape llama-3.1-8b --context 131072 --batch 1,4 --json kernels.json
    """
    from ..bench.kernels import KernelJob
    from ..bench.table import kernel_table
    from .terminal import output, progress, quiet_libraries

    quiet_libraries()
    job = KernelJob.check(
        shape=shape,
        contexts=context,
        batches=batch,
        threads=threads,
        operations=operation or [],
        implementations=implementation,
        budget=budget,
        rounds=rounds,
        dtype=dtype,
        device=device,
        json=json,
    )
    with progress(job.units) as advance:
        results = job.run(advance)
    output().print(kernel_table(results))


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


@bench.command()
def soak(
    model: Model = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Policy to run; give it once per policy. Default: lychee_cluster, resa.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that are read densely first.")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are decoded then.")] = 20_000,
    block: Annotated[
        int, typer.Option(min=1, help="Steps that a policy takes before the next one has its turn.")
    ] = 500,
    window: Annotated[int, typer.Option(min=1, help="Steps that the window hit rate looks back.")] = 32,
    timed: Annotated[bool, typer.Option(help="Time every step.")] = True,
    sets: Annotated[bool, typer.Option(help="Decode the same tokens again and watch which sets are chosen.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything measured there.", show_default=False)
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw it there.", show_default=False)] = None,
) -> None:
    """Decode thousands of tokens under each policy: memory, step time, and how steady the chosen sets are.

    The tokens are given, those of a held-out text: a small model that decodes greedily would soon go round in circles,
    and given tokens are the same for all policies. Policies take turns block by block, and a control step that is
    always the same tells the machine's drift from theirs.

    Example:

      saccade bench soak --tokens 20000 --json soak.json --picture soak.svg
    """
    from ..bench.soak import Soak, SoakJob, SoakSettings
    from ..report.soak import soak_picture, soak_tables
    from .terminal import quiet_libraries

    quiet_libraries()
    settings = SoakSettings(
        model=model,
        policies=tuple(policy or ()),
        prompt=prompt,
        tokens=tokens,
        block=block,
        window=window,
        timed=timed,
        sets=sets,
        device=device,
        dtype=dtype,
        threads=threads,
    )
    job = SoakJob.check(settings)
    _run(Soak(job), job.units, json, picture, soak_tables, soak_picture)


@bench.command()
def growth(
    context: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens in the cache.")
    ] = "8192,16384,32768,65536,131072,262144,524288,1048576",
    selector: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="cap64, sqrt, root (sqrt without its limit of 64), quest, exact.")
    ] = "cap64,sqrt,root,quest,exact",
    budget: Annotated[int, typer.Option(min=1, help="Tokens that are chosen.")] = 1024,
    k_g: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Coarse units that a search keeps. Default: as many as hold 4 budgets, as lychee_cluster's own.",
            show_default=False,
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of the one KV head.")] = 64,
    group: Annotated[int, typer.Option(min=1, help="Query heads of the one KV head.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed selections per context and selector.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    seed: Seed = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything measured there.", show_default=False)
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw it there.", show_default=False)] = None,
) -> None:
    """Time the choice of a set against the context, on synthetic keys of one KV head, and fit its growth.

    LycheeCluster's index is built for real, which takes minutes for a million tokens; then all contexts and selectors
    are timed in turns. Nodes visited are counted as well: they do not depend on the machine.

    Example:

      saccade bench growth --context 8192,65536,524288 --json growth.json --picture growth.svg
    """
    from ..bench.growth import Growth, GrowthSettings
    from ..report.growth import growth_picture, growth_table
    from .terminal import quiet_libraries

    quiet_libraries()
    settings = GrowthSettings.check(
        contexts=context,
        selectors=selector,
        budget=budget,
        head_dim=head_dim,
        group=group,
        rounds=rounds,
        threads=threads,
        dtype=dtype,
        seed=seed,
        k_g=k_g,
    )
    measurement = Growth(settings)
    _run(measurement, measurement.units, json, picture, lambda results: [growth_table(results)], growth_picture)


class _Measurement(Protocol):
    """What runs for long and can be read at any time."""

    complete: bool

    def run(self, advance: Callable[[str], None]) -> None: ...

    def results(self) -> dict[str, Any]: ...


def _run(
    measurement: _Measurement,
    units: int,
    json: Path | None,
    picture: Path | None,
    tables: Callable[[dict[str, Any]], Sequence[Any]],
    draw: Callable[[dict[str, Any]], str],
) -> None:
    """Measure, and whatever ends it, write and print what has been measured."""
    from ..eval.output import check_file, write_json, write_text
    from .terminal import output, progress

    for path in (json, picture):
        if path is not None:
            check_file(path)
    try:
        with progress(units) as advance:
            measurement.run(advance)
    except KeyboardInterrupt:
        pass
    finally:
        results = measurement.results()
        if json is not None:
            write_json(json, results)
        if picture is not None:
            write_text(picture, draw(results))
    console = output()
    for table in tables(results):
        console.print(table)
    for note in results.get("notes", ()):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    if not measurement.complete:
        console.print("interrupted: what was measured until then is above", highlight=False)
        raise typer.Exit(INTERRUPTED)
