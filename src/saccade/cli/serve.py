"""`saccade serve`: vLLM's OpenAI-compatible server, decoding sparsely."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from .options import flag, number, words

if TYPE_CHECKING:
    from ..adapters.vllm.server.serve import Server

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
"""Of the command: what it does not know is vLLM's; `-h` too, or it would be found inside vLLM's short flags."""


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        words(
            "DIR_OR_HUB_ID",
            "A model folder or hub id. Default: the bundled model, on a CPU in float32 with 2 GiB of cache.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        words(
            "SPEC",
            "Policy that requests decode with: a spec, see `saccade policies`; auto; the path of a recipe; "
            "recipe:NAME. Default: that of the recipe beside the model.",
        ),
    ] = None,
    port: Annotated[str | None, words("N", "Port to listen on. 8000.")] = None,
    host: Annotated[str | None, words("NAME", "Address to listen on. Default: 127.0.0.1, this machine only.")] = None,
    recall: Annotated[
        float | None,
        number(
            "SHARE",
            "Share of decoding steps that measure recall of heads with a set, reading all keys once more. 0.",
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        words(
            "TEXTS",
            "Find the layer of tidal or less_is_more first, as `saccade calibrate layers` does, on these texts: a "
            "file, a folder, or the word library, Python's. It is kept, and found by the next start.",
        ),
    ] = None,
    rectify_together: Annotated[
        bool,
        flag(
            "--rectify-together",
            "With a rectified policy: when it is one request's turn, all that decode run their dense pass with it.",
        ),
    ] = False,
) -> None:
    """Serve a model behind an OpenAI-compatible API, decoding sparsely; vLLM does everything else.

    Any further option is vLLM's. Requests that say "vllm_xargs": {"saccade": "off"} decode densely. Metrics, those of
    saccade too, are at /metrics.

    Examples:

      saccade serve --model ./Qwen3-8B --policy less_is_more:budget=2048,reselect=12 --port 8000

      saccade serve --model ./Qwen3-8B --policy less_is_more:budget=2048 --calibrate ./documents

      saccade serve --policy resa --max-model-len 8192 --api-key secret

      saccade serve --model ./Llama-3.1-8B --policy quest:budget=2048 --tensor-parallel-size 2
    """
    rest = list(context.args)
    if "-h" in rest:
        typer.echo(context.get_help())
        return
    for name, value in (("--port", port), ("--host", host)):
        rest += [] if value is None else [name, value]
    from ..adapters.vllm.metrics import VARIABLE, exporting, leftovers
    from ..adapters.vllm.server.serve import RefusedError, prepare
    from .layer import find_layer

    search = None if calibrate is None else partial(find_layer, calibrate)
    with exporting() as folder:
        before = leftovers(folder)
        if before:
            sys.stderr.write(f"note: {VARIABLE}={folder} has {before} files of an earlier run; figures add to theirs\n")
        try:
            together = rectify_together or None
            server = prepare(rest, model=model, policy=policy, recall=recall, rectify_together=together, search=search)
        except RefusedError as refused:
            for reason in refused.reasons:
                sys.stderr.write(f"saccade: error: {reason}\n")
            raise typer.Exit(2) from None
        _print(server)
        server.run()


def _print(server: Server) -> None:
    from .terminal import output

    rectify = server.options.policy.rectify
    passes = "" if rectify is None else f", a dense pass after every {rectify.every} sparse steps"
    block = server.args.block_size
    blocks = "blocks as vLLM chooses" if block is None else f"blocks of {block} tokens"
    rows = [
        ("policy", str(server.options.policy)),
        *(("note", note) for note in server.notes),
        ("model", f"{server.model}: {server.shape}"),
        ("cache", f"{blocks}{passes}"),
        ("address", f"{server.address}/v1"),
        ("metrics", f"{server.address}/metrics"),
    ]
    console = output()
    for name, value in rows:
        console.print(f"[bold]{name:<8}[/bold] ", end="")
        console.print(value, markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
