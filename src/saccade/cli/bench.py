"""`saccade bench`: timings, the baselines in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SaccadeError
from . import options
from .options import Device, JsonFile, RandomDtype, Shape, count, words

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.engines import EngineJob

CONTEXTS, POLICIES, BUDGET = ["0,4096,32768"], ["dense", "tidal", "less_is_more"], ["2048"]
SERVED_CONTEXTS, SERVED_BATCHES, SERVED_POLICIES = ["8192,32768"], ["1,4"], ["less_is_more", "quest"]

bench = typer.Typer(no_args_is_help=True, help="Time decoding, with the baselines in the same run.")


@bench.command()
def decode(
    called: typer.Context,
    shape: Shape = "smollm2-135m",
    context: Annotated[list[str], words("N,N", "Cached tokens; 0: all that a step does beside the cache.")] = CONTEXTS,
    batch: options.Batches = options.ONE,
    threads: options.ThreadCounts = options.ONE,
    policy: options.Policies = POLICIES,
    budget: options.TimedBudgets = BUDGET,
    steps: Annotated[int, count("Timed steps per variant.", 2)] = 12,
    baseline: Annotated[
        list[str] | None, words("NAME", "Dense decoders beside ours: transformers, torch-sdpa; or none. Default: all.")
    ] = None,
    dtype: RandomDtype = "bfloat16",
    device: Device = "auto",
    json: JsonFile = None,
) -> None:
    """Time one decoded token on a cache of random keys, without prefill: dense decoders and policies in turns.

    Medians of interleaved steps, and where their time goes. The share of the ceiling is what the fastest dense decoder
    takes at an empty context, plus the cache bytes of the cost model at the read bandwidth measured in the same run,
    over the time measured. Lists repeat, or are joined by commas: every context with every batch and number of threads.

    Example:

      saccade bench decode --context 0,32768,131072 --threads 1 --policy tidal --policy quest --json bench.json
    """
    from ..bench.decode import BenchJob, BenchSettings
    from ..report.timings import decode_table
    from .terminal import quiet_libraries, time_and_show

    quiet_libraries()
    settings = BenchSettings(shape, context, batch, threads, dtype, device, policy, budget, steps, baseline or ())
    # A command line that has more baselines hands them in, made when they are needed.
    time_and_show(BenchJob.check(settings, called.obj() if called.obj else ()), decode_table, json)


@bench.command()
def serve(
    shape: Shape = "smollm2-135m",
    context: Annotated[list[str], words("N,N", "Cached tokens of every row.")] = SERVED_CONTEXTS,
    batch: options.Batches = SERVED_BATCHES,
    points: Annotated[list[str] | None, words("CxB,CxB", "Such as 16x1,131072x4, instead of those two.")] = None,
    threads: options.VllmThreads = 2,
    policy: options.Policies = SERVED_POLICIES,
    budget: options.TimedBudgets = BUDGET,
    steps: Annotated[int | None, count("Timed steps. Default: 64 on CUDA, 12 on a CPU.", 2)] = None,
    block: options.Block = None,
    max_model_len: Annotated[int | None, count("Most tokens of a row. Default: as many as are needed.")] = None,
    memory: options.Memory = 0.9,
    tensor_parallel: options.TensorParallel = 1,
    rectify_together: options.RectifyTogether = False,
    drafts: Annotated[int | None, count("Tokens that policies draft and vLLM verifies: rectify=N:verify.")] = None,
    draft_rate: options.DraftRate = None,
    adaptive: Annotated[bool, options.flag("--adaptive", "Draft as many tokens as pay, as a server does.")] = False,
    kv_cache_dtype: options.CacheDtype = "auto",
    quantization: options.Quantization = None,
    dtype: RandomDtype = "bfloat16",
    device: options.VllmDevice = "auto",
    json: JsonFile = None,
    resume: options.Resume = False,
) -> None:
    """Time one output token of vLLM, stock and under policies, on a cache of random keys.

    Nothing is prefilled: requests start with their blocks filled. The share of the ceiling is the time that the bytes
    of the cost model take at the bandwidth measured in the same run, on top of stock's time at an empty context.
    On a CPU all engines stand in one process and take turns. On CUDA they run as served, one after another, stock
    first and last: a setting at which the two differ by more than 2% is void. Rectified policies are timed there alone,
    in whole periods: a step's time is then the mean of one. Drafts and the pass that verifies them are timed as the
    tokens that a row gains by them: of random weights next to none, unless --draft-rate says how many. With --adaptive
    the time is the mean of all cycles, those that try a length included, and the ceiling a dense step's.

    Example:

      saccade bench serve --shape llama-3.1-8b --points 131072x1,131072x4 --policy tidal --json serve.json --resume
    """
    from ..bench.serving import ServingJob, ServingSettings
    from ..report.timings import serving_table
    from .terminal import quiet_libraries

    quiet_libraries()
    if drafts is not None:
        policy = [f"{one}{',' if ':' in one else ':'}rectify={drafts}:verify" for one in policy]
    settings = ServingSettings(
        shape=shape, contexts=context, batches=batch, threads=[str(threads)], dtype=dtype, device=device,
        policies=policy, budgets=budget, steps=steps, block=block, memory=memory, tensor_parallel=tensor_parallel,
        kv_cache_dtype=kv_cache_dtype, rectify_together=rectify_together, points=points or (),
        max_model_len=max_model_len, draft_rate=draft_rate, adaptive=adaptive, quantization=quantization,
    )  # fmt: skip
    time_engines(ServingJob.check(settings), serving_table, json, resume=resume)


def time_engines(
    job: EngineJob[Any], table: Callable[[Mapping[str, Any]], Table], json: Path | None, *, resume: bool
) -> None:
    """Run a benchmark of vLLM's engines and show it; `resume`: go on with the rows that the file has already.

    Raises:
        SaccadeError: if vLLM is not installed.
    """
    from ..adapters.vllm.server.serve import INSTALL
    from ..eval.output import read_json
    from .terminal import time_and_show

    if find_spec("vllm") is None:
        raise SaccadeError(INSTALL)
    before = read_json(json) if resume and json is not None and json.is_file() else None
    time_and_show(job, table, json, before=before)
