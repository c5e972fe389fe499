"""`python -m benchmarks`: what the project measures of itself; `saccade bench` is what users measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.measuring import measure
from saccade.cli import options
from saccade.cli.bench import BUDGET, SERVED_CONTEXTS, SERVED_POLICIES, decode, time_engines
from saccade.cli.group import OneLineErrors
from saccade.cli.options import Device, Dtype, JsonFile, Model, Picture, RandomDtype, Seed, count, flag, number, words
from saccade.cli.terminal import output, quiet_libraries, say, time_and_show

if TYPE_CHECKING:
    from saccade.bench.baselines import Baseline

CONTEXTS, AUTO = ["32768,131072"], ["auto"]
CLIENTS = ["4"]

app = typer.Typer(name="benchmarks", cls=OneLineErrors, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _benchmarks() -> None:
    """Time single operations, short and long decoding, the growth of an index, drafts, loads, and an agent's day."""


@app.command()
def kernels(
    shape: options.Shape = "llama-3.1-8b",
    context: Annotated[list[str], words("N,N", "Cached tokens per row.")] = CONTEXTS,
    batch: options.Batches = options.ONE,
    threads: options.ThreadCounts = options.ONE,
    operation: Annotated[
        list[str] | None, words("NAME", "Operation; give it once per operation. Default: all.")
    ] = None,
    implementation: Annotated[
        list[str], words("NAME", "auto, native, cpu, triton, reference; left out where refused.")
    ] = AUTO,
    budget: Annotated[int, typer.Option(min=16, help="Tokens of a set.")] = 2048,
    rounds: Annotated[int, typer.Option(min=2, help="Timed calls of each operation.")] = 15,
    dtype: RandomDtype = "bfloat16",
    device: Device = "auto",
    json: JsonFile = None,
) -> None:
    """Time single operations on one layer's cache of random keys: attention, scores, top-k, page bounds, selections.

    Calls take turns and go round in several caches, so that none is warm; each result is first compared with float64.

    Example:

      python -m benchmarks kernels --shape llama-3.1-8b --context 131072 --batch 1,4 --json kernels.json
    """
    from .kernel_table import kernel_table
    from .kernels import KernelJob, KernelSettings

    quiet_libraries()
    settings = KernelSettings(
        shape=shape, contexts=context, batches=batch, threads=threads, dtype=dtype, device=device,
        operations=operation or (), implementations=implementation, budget=budget, rounds=rounds,
    )  # fmt: skip
    time_and_show(KernelJob.check(settings), kernel_table, json)


def _baselines() -> tuple[Baseline]:
    from .vllm_baseline import VLLM

    return (VLLM,)


DECODE = """`saccade bench decode` with one more baseline: vllm, vLLM's CPU kernel by itself on its own pages.

It runs in our model code, as torch-sdpa does, and is left out where it cannot, in a line that says why.

Example:

  python -m benchmarks decode --context 32768 --threads 1 --policy quest --json bench.json
"""
app.command(help=DECODE, context_settings={"obj": _baselines})(decode)


@app.command()
def soak(
    model: Model = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="Policy to run; give it once per policy. Default: lychee_cluster, resa."),
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
    json: JsonFile = None,
    picture: Picture = None,
) -> None:
    """Decode thousands of tokens under each policy: memory, step time, and how steady the chosen sets are.

    The tokens are given, those of a held-out text: a small model that decodes greedily would soon go round in circles,
    and given tokens are the same for all policies. Policies take turns block by block, and a control step that is
    always the same tells the machine's drift from theirs.

    Example:

      python -m benchmarks soak --tokens 20000 --json soak.json --picture soak.svg
    """
    from .soak import Soak, SoakJob, SoakSettings
    from .soak_report import soak_picture, soak_tables

    quiet_libraries()
    settings = SoakSettings(
        model=model, policies=tuple(policy or ()), prompt=prompt, tokens=tokens, block=block, window=window,
        timed=timed, sets=sets, device=device, dtype=dtype, threads=threads,
    )  # fmt: skip
    job = SoakJob.check(settings)
    measure(lambda: Soak(job), Soak.results, (json, picture), soak_tables, soak_picture)


@app.command()
def growth(
    context: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens in the cache.")
    ] = "8192,16384,32768,65536,131072,262144,524288,1048576",
    selector: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="groups, cap64, sqrt, root (no limit of 64), quest, exact."),
    ] = "groups,cap64,sqrt,root,quest,exact",
    budget: Annotated[int, typer.Option(min=1, help="Tokens that are chosen.")] = 1024,
    k_g: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Coarse units that a search of cap64, sqrt and root keeps. Default: as many as hold 4 budgets.",
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of the one KV head.")] = 64,
    group: Annotated[int, typer.Option(min=1, help="Query heads of the one KV head.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Timed selections per context and selector.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    seed: Seed = 0,
    json: JsonFile = None,
    picture: Picture = None,
) -> None:
    """Time the choice of a set against the context, on synthetic keys of one KV head, and fit its growth.

    LycheeCluster's index is built for real, which takes minutes for a million tokens; then all contexts and selectors
    are timed in turns. Nodes visited are counted as well: they do not depend on the machine.

    Example:

      python -m benchmarks growth --context 8192,65536,524288 --json growth.json --picture growth.svg
    """
    from .growth import Growth, GrowthSettings
    from .growth_report import growth_picture, growth_table

    quiet_libraries()
    settings = GrowthSettings(
        contexts=context, selectors=selector, budget=budget, head_dim=head_dim, group=group, rounds=rounds,
        threads=threads, dtype=dtype, seed=seed, k_g=k_g,
    )  # fmt: skip
    checked = Growth.check(settings)
    measure(lambda: checked, Growth.results, (json, picture), lambda results: [growth_table(results)], growth_picture)


@app.command()
def drafts(
    model: Annotated[str, typer.Option(metavar="DIR", help="Model folder.")],
    policy: Annotated[str, typer.Option(metavar="SPEC", help="Policy, without budget and rectification.")],
    budget: Annotated[str, typer.Option(metavar="N,N", help="Budgets; empty: the policy's own.")] = "2048",
    every: Annotated[int, typer.Option(min=1, help="Drafts that a pass verifies at most.")] = 8,
    context: Annotated[int, typer.Option(min=1024, help="Tokens of a prompt.")] = 30720,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each kind: code, prose, questions about code.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=32, help="Tokens of an answer.")] = 256,
    batch: Annotated[str, typer.Option(metavar="N,N", help="Rows whose pace is taken.")] = "1,8,32",
    rectified: Annotated[
        bool, flag("--rectified", "Instead of as many drafts as pay: the policy rectified, not verified.")
    ] = False,
    seed: Seed = 20,
    json: JsonFile = None,
) -> None:
    """Count which drafts vLLM accepts in lossless serving, and time what comes of them; stock first and last.

    Acceptance is counted where always as many are drafted; with the first budget also as many as pay, as is served.

    Example:

      python -m benchmarks drafts --model ./Qwen2.5-Coder-1.5B --policy less_is_more:reselect=20 --json drafts.json
    """
    from .drafts import Drafts, DraftsSettings, drafts_table

    quiet_libraries()
    settings = DraftsSettings(model, policy, budget, every, context, texts, new_tokens, batch, seed, rectified)
    job: Any = Drafts.check(settings)  # runs as a GridJob does, on no grid
    time_and_show(job, drafts_table, json)


@app.command()
def serve(
    shape: options.Shape = "smollm2-135m",
    context: Annotated[list[str], words("N,N", "Lengths of prompts, in turn.")] = SERVED_CONTEXTS,
    clients: Annotated[list[str], words("N,N", "So many clients, each asking again at once.")] = CLIENTS,
    new_tokens: Annotated[int, count("Tokens of an answer.", 2)] = 128,
    shared: Annotated[float, number("SHARE", "Share of each prompt that all have in common.")] = 0.0,
    requests: Annotated[int | None, count("Requests that count. Default: 4 per client.")] = None,
    stream: Annotated[float | None, number("N", "So many prompts a second beside clients whose answers go on.")] = None,
    draft_rate: options.DraftRate = None,
    threads: options.VllmThreads = 2,
    policy: options.Policies = SERVED_POLICIES,
    budget: options.TimedBudgets = BUDGET,
    block: options.Block = None,
    memory: options.Memory = 0.9,
    tensor_parallel: options.TensorParallel = 1,
    rectify_together: options.RectifyTogether = False,
    kv_cache_dtype: options.CacheDtype = "auto",
    dtype: RandomDtype = "bfloat16",
    device: options.VllmDevice = "auto",
    json: JsonFile = None,
    resume: options.Resume = False,
) -> None:
    """Time requests of vLLM with random weights, stock and under policies, under a load that does not let up.

    Prompts of random tokens are prefilled, found in the prefix cache and answered. Engines run one after another, stock
    first and last: a number of clients at which the two differ by more than 5% is void. What counts begins when as many
    requests were answered as there are clients, and one of every length, and ends while all are busy; requests that
    find no room in the cache wait.

    Example:

      python -m benchmarks serve --clients 4 --context 4096,8192 --shared 0.9 --new-tokens 64 --policy quest
    """
    from .serve.clients import ClientsJob, ClientsSettings
    from .serve.table import load_table

    quiet_libraries()
    settings = ClientsSettings(
        shape=shape, contexts=context, batches=clients, threads=[str(threads)], dtype=dtype, device=device,
        policies=policy, budgets=budget, steps=None, block=block, memory=memory, tensor_parallel=tensor_parallel,
        kv_cache_dtype=kv_cache_dtype, rectify_together=rectify_together, new_tokens=new_tokens, shared=shared,
        requests=requests, stream=stream, draft_rate=draft_rate,
    )  # fmt: skip
    time_engines(ClientsJob.check(settings), load_table, json, resume=resume)


@app.command()
def agent(
    shape: options.Shape = "smollm2-135m",
    conversations: Annotated[list[str], words("N,N", "So many at once, each with one request at a time.")] = CLIENTS,
    turns: Annotated[int, count("Turns of a conversation.", 2)] = 20,
    start: Annotated[int, count("Tokens of a conversation's first prompt.")] = 65_536,
    end: Annotated[int, count("Tokens of a conversation with its last answer.")] = 131_072,
    answers: Annotated[str, words("N,N", "Tokens of the shortest answer and of the longest.")] = "50,800",
    shared: Annotated[float, number("SHARE", "Share of the first prompts that all have in common.")] = 0.25,
    facts: Annotated[
        bool, flag("--facts", "The folder's own weights; packages' sources are said, and a code asked for each turn.")
    ] = False,
    draft_rate: options.DraftRate = None,
    threads: options.VllmThreads = 2,
    policy: options.Policies = SERVED_POLICIES,
    budget: options.TimedBudgets = BUDGET,
    memory: options.Memory = 0.9,
    tensor_parallel: options.TensorParallel = 1,
    kv_cache_dtype: options.CacheDtype = "auto",
    dtype: RandomDtype = "bfloat16",
    device: options.VllmDevice = "auto",
    json: JsonFile = None,
    resume: options.Resume = False,
) -> None:
    """Time an agent's day on vLLM with random weights: conversations that grow turn by turn, stock and under policies.

    Every prompt is all that was said before, answers included, and a new message of random tokens; weights and text are
    real with --facts. Engines run one after another, stock first and last. All answer the same numbers of tokens, drawn
    once, short ones more often: their logarithms are spread evenly. Which tokens, each engine says for itself. A row
    decodes from its first token to its last; "alone" is the time in which no prompt waits for its first. A short day
    before, in which kernels are compiled, does not count.

    Example:

      python -m benchmarks agent --shape smollm2-135m:4 --start 256 --end 512 --turns 3 --answers 4,16 --policy quest
    """
    from .serve.agent import AgentJob, AgentSettings
    from .serve.table import day_table

    quiet_libraries()
    settings = AgentSettings(
        shape=shape, contexts=[f"{start},{end}"], batches=conversations, threads=[str(threads)], dtype=dtype,
        device=device, policies=policy, budgets=budget, steps=None, memory=memory, tensor_parallel=tensor_parallel,
        kv_cache_dtype=kv_cache_dtype, shared=shared, draft_rate=draft_rate, turns=turns, answers=answers,
        facts=facts,
    )  # fmt: skip
    time_engines(AgentJob.check(settings), day_table, json, resume=resume)


@app.command()
def tables() -> None:
    """Write the tables and pictures of README.md and docs/ anew, from docs/results and by arithmetic; tests compare."""
    from tables.blocks import write

    quiet_libraries()
    changed = write()
    say(output(), "changed: " + ", ".join(changed) if changed else "nothing changed")


if __name__ == "__main__":
    app()
