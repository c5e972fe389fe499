"""`saccade bench`: timings, the baselines in the same run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import typer

from ..errors import SaccadeError
from . import options
from .group import need_eval
from .options import Device, JsonFile, Picture, RandomDtype, Shape, count, flag, number, words

CONTEXTS, POLICIES, BUDGET = ["0,4096,32768"], ["dense", "tidal", "less_is_more"], ["2048"]
BASELINES = ["transformers", "torch-sdpa", "vllm"]
SERVED_CONTEXTS, SERVED_BATCHES, SERVED_POLICIES = ["8192,32768"], ["1,4"], ["less_is_more", "quest"]

bench = typer.Typer(no_args_is_help=True, help="Time decoding, with the baselines in the same run.")


@bench.command()
def decode(
    shape: Shape = "smollm2-135m",
    context: Annotated[
        list[str], words("N,N", "Cached tokens; 0 is the empty context, everything but the cache.")
    ] = CONTEXTS,
    batch: options.Batches = options.ONE,
    threads: options.ThreadCounts = options.ONE,
    policy: options.Policies = POLICIES,
    budget: options.TimedBudgets = BUDGET,
    steps: Annotated[int, count("Timed steps per variant.", 2)] = 12,
    baseline: Annotated[
        list[str], words("NAME", "Dense decoders beside ours: transformers, torch-sdpa, vllm; or none.")
    ] = BASELINES,
    dtype: RandomDtype = "bfloat16",
    device: Device = "auto",
    json: JsonFile = None,
    picture: Picture = None,
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
    from ..bench.decode import BenchJob, BenchSettings
    from ..eval.output import check_file
    from ..files import replace_text
    from ..report.timings import decode_table
    from .terminal import quiet_libraries, time_and_show

    quiet_libraries()
    settings = BenchSettings(shape, context, batch, threads, dtype, device, policy, budget, steps, baseline)
    job = BenchJob.check(settings)
    if picture is not None:
        check_file(picture)
    results = time_and_show(job, decode_table, json)
    if picture is not None:
        from ..report.decode import decode_picture

        replace_text(picture, decode_picture(results))


@bench.command()
def serve(
    shape: Shape = "smollm2-135m",
    context: Annotated[
        list[str], words("N,N", "Cached tokens of every row; with --clients lengths of prompts, in turn.")
    ] = SERVED_CONTEXTS,
    batch: Annotated[list[str] | None, words("N,N", "Rows decoded together. Default: 1,4.")] = None,
    points: Annotated[
        list[str] | None, words("CxB,CxB", "Contexts and batches, such as 16x1,131072x4; instead of those two.")
    ] = None,
    clients: Annotated[
        list[str] | None, words("N,N", "Time requests instead of steps: so many clients, each asking again at once.")
    ] = None,
    new_tokens: Annotated[int | None, count("With --clients: tokens of an answer. Default: 128.", 2)] = None,
    shared: Annotated[
        float | None, number("SHARE", "With --clients: share of each prompt that all have in common. Default: 0.")
    ] = None,
    requests: Annotated[int | None, count("With --clients: requests that count. Default: 4 per client.")] = None,
    threads: Annotated[int, count("CPU threads.")] = 2,
    policy: options.Policies = SERVED_POLICIES,
    budget: options.TimedBudgets = BUDGET,
    steps: Annotated[int | None, count("Timed steps. Default: 64 on CUDA, 12 on a CPU.", 2)] = None,
    block: Annotated[
        int | None, count("Tokens of a block of vLLM's cache. Default: 16 on CUDA, 32 on a CPU.", 16)
    ] = None,
    max_model_len: Annotated[
        int | None, count("Most tokens of a row, which bounds buffers and grids. Default: what is needed.")
    ] = None,
    memory: Annotated[float, number("SHARE", "Share of a GPU's memory for vLLM.")] = 0.9,
    tensor_parallel: Annotated[int, count("GPUs that share the model.")] = 1,
    rectify_together: Annotated[
        bool, flag("--rectify-together", "Rectified policies run the dense passes of a batch together.")
    ] = False,
    kv_cache_dtype: Annotated[
        str, words("NAME", "Of the cache, stock's too: auto (as --dtype), bfloat16, float16, fp8, fp8_e4m3.")
    ] = "auto",
    dtype: RandomDtype = "bfloat16",
    device: Annotated[str, words("NAME", "auto, cpu, cuda: what vLLM was built for.")] = "auto",
    json: JsonFile = None,
    resume: Annotated[bool, flag("--resume", "Go on with the rows that FILE of --json has already.")] = False,
) -> None:
    """Time one output token of vLLM, stock and under policies, on a cache of random keys; or requests under a load.

    Nothing is prefilled: requests start with their blocks filled. The share of the ceiling is the time that the bytes
    of the cost model take at the bandwidth measured in the same run, on top of stock's time at an empty context.
    On a CPU all engines stand in one process and take turns. On CUDA they run as served, one after another, stock
    first and last: a setting at which the two differ by more than 2% is void. Rectified policies are timed there alone,
    in whole periods: a step's time is then the mean of one.

    With --clients prompts of random tokens are prefilled, found in the prefix cache and answered; engines run one after
    another, stock first and last, void beyond 5%. What counts begins when as many requests were answered as there are
    clients, and one of every length, and ends while all are busy; requests that find no room in the cache wait.

    Example:

      saccade bench serve --context 8192,32768 --batch 1,4 --policy tidal --policy quest --json serve.json

      saccade bench serve --shape llama-3.1-8b --points 131072x1,131072x4 --policy tidal --json serve.json --resume

      saccade bench serve --clients 4 --context 4096,8192 --shared 0.9 --new-tokens 64 --policy quest
    """
    from ..adapters.vllm.server.serve import INSTALL
    from ..bench.clients import ClientsJob, ClientsSettings
    from ..bench.engines import EngineJob
    from ..bench.serving import ServingJob, ServingSettings
    from ..eval.output import read_json
    from ..report.timings import load_table, serving_table
    from .terminal import quiet_libraries, time_and_show

    quiet_libraries()
    steps_only: dict[str, Any] = {"batch": batch, "points": points, "steps": steps, "max_model_len": max_model_len}
    load_only: dict[str, Any] = {"new_tokens": new_tokens, "shared": shared, "requests": requests}
    for name, given in (load_only if clients is None else steps_only).items():
        if given is not None:
            option, how = name.replace("_", "-"), "without" if clients is None else "with"
            raise SaccadeError(f"--{option} is not valid {how} --clients")
    common: dict[str, Any] = {
        "shape": shape, "contexts": context, "threads": [str(threads)], "dtype": dtype, "device": device,
        "policies": policy, "budgets": budget, "steps": steps, "block": block, "memory": memory,
        "tensor_parallel": tensor_parallel, "rectify_together": rectify_together, "kv_cache_dtype": kv_cache_dtype,
    }  # fmt: skip
    job: EngineJob[Any, Any]
    if clients is None:
        common |= {"batches": batch or SERVED_BATCHES, "points": points or (), "max_model_len": max_model_len}
        job, table = ServingJob.check(ServingSettings(**common)), serving_table
    else:
        chosen = {name: value for name, value in load_only.items() if value is not None}
        job, table = ClientsJob.check(ClientsSettings(**common, batches=clients, **chosen)), load_table
    if find_spec("vllm") is None:
        raise SaccadeError(INSTALL)
    before = None
    if resume and json is not None and json.is_file() and json.stat().st_size:
        before = read_json(json)
    time_and_show(job, table, json, before=before)
