"""`saccade doctor`: what this machine has, what will run on it, and what to install."""

from importlib import metadata, util
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ..errors import SaccadeError, install
from .group import EVAL
from .options import words


class Finding(NamedTuple):
    """One line: what was looked for, what was found, and what to do about it ("": nothing)."""

    name: str
    found: str
    advice: str = ""


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="DIR_OR_HUB_ID", help="Say which recipe it has, too.")] = None,
    server: Annotated[
        str | None, words("URL", "Say what became of a running server's drafts, too; such as http://127.0.0.1:8000.")
    ] = None,
    json: Annotated[
        Path | None, words("FILE", "With --server: write that there, for `saccade tune --acceptance`.")
    ] = None,
) -> None:
    """Say in ten lines what is installed, which kernels run where, and what is missing.

    Nothing is changed or compiled, and nothing downloaded but a hub id's configuration and recipe. Of a server its
    /metrics are read, once.

    Examples:

      saccade doctor ./Qwen3-8B

      saccade doctor --server http://127.0.0.1:8000 --json acceptance.json
    """
    from .terminal import output

    if json is not None and server is None:
        raise SaccadeError(f"--json {json} is valid only with --server URL")
    lines = findings(model)
    if server is not None:
        lines += _server(server, json)
    console = output()
    for name, found, advice in lines:
        console.print(f"{name:<14}{found}", highlight=False, markup=False, soft_wrap=True)
        if advice:
            console.print(f"{'':<14}→ {advice}", highlight=False, markup=False, soft_wrap=True, style="yellow")


def findings(model: str | None = None) -> list[Finding]:
    """All lines on this machine, in order; the last is on a model, if one is named."""
    from ..recipes.kept import known

    recipe = [] if model is None else [Finding("recipe", *known(model))]
    return [*_versions(), *_processor(), *_accelerator(), *_extras(), _vllm(), *recipe]


def _server(url: str, json: Path | None) -> list[Finding]:
    """What dense passes of a running server say of its drafts; one policy's are written, if a file is named."""
    from ..adapters.vllm.metrics import drafts_of

    found, cycles = drafts_of(url)
    if json is not None:
        if len(found) != 1:
            raise SaccadeError(f"--json {json} takes drafts of one policy: {url} has verified those of {len(found)}")
        found[0].write(json)
    advice = "no draft was verified yet: drafts come with rectify=N:verify, as requests decode"
    lines = [Finding("server", url, "" if found else advice)]
    for one in found:
        total, cycled = sum(one.drafted), one.drafted[0]
        share = f"{total:,} verified, {sum(one.accepted) / total:.1%} accepted, {total / cycled:.2f} per drafting cycle"
        chances = ", ".join(f"{chance:.3f}" for chance in one.chances)
        lines += [Finding("drafts", f"{one.policy}: {share}"), Finding("chance", f"by position, from 0: {chances}")]
    told = ", ".join(f"{count:,} of {drafts}" for drafts, count in cycles.items())
    return [*lines, *([Finding("cycles", f"steps by drafts of a row: {told}")] if told else [])]


def _versions() -> list[Finding]:
    from ..checkpoints.versions import TRIED, outdated
    from ..recipes.machine import versions

    found = versions()
    held = ", ".join(f"{name} {found[name]} (tried: {', '.join(tried)})" for name, tried in TRIED.items())
    return [
        Finding("saccade", f"{found['saccade']} on Python {found['python']}", _namesake()),
        Finding("libraries", held, outdated() or ""),
    ]


def _namesake() -> str:
    """What to do about a distribution `saccade` beside ours: both write the package of that name."""
    try:
        metadata.distribution("saccade-attention")
        other = metadata.distribution("saccade")
    except metadata.PackageNotFoundError:
        return ""
    former = any(point.value.startswith("saccade.adapters.vllm.") for point in other.entry_points)
    what = "this project by its former name" if former else "another project"
    told = f"saccade {other.version}, {what}, is installed beside saccade-attention, and both write the package saccade"
    return f"the distribution {told}: pip uninstall saccade, then pip install . in a checkout of saccade-attention"


def _processor() -> list[Finding]:
    import torch

    from ..kernels._native.library import library
    from ..recipes.machine import free_memory, kernels_on, processor

    cpu = torch.device("cpu")
    free = free_memory(cpu)
    room = "" if free is None else f", {free / 2**30:.1f} GiB free"
    missing = "install a C compiler, then in a checkout of saccade: pip install --force-reinstall --no-deps ."
    return [
        Finding("processor", f"{processor()}, {torch.get_num_threads()} threads{room}"),
        Finding("CPU kernels", kernels_on(cpu), missing if library() is None else ""),
    ]


def _accelerator() -> list[Finding]:
    import torch

    from ..kernels._triton.refusals import installed, unfit
    from ..recipes.machine import device_name, free_memory

    if not torch.cuda.is_available():
        built = "torch sees none" if torch.version.cuda else "this torch was built without CUDA"
        return [Finding("GPU", f"none: {built}")]
    lines = []
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        lines.append(Finding("GPU", f"{device_name(device)}, {(free_memory(device) or 0) / 2**30:.1f} GiB free"))
        reason = unfit(device) if installed() else "triton is not installed"
        found = "triton" if reason is None else f"torch: {reason}"
        lines.append(Finding("GPU kernels", found, "" if installed() else "pip install triton"))
    return lines


def _extras() -> list[Finding]:
    missing = [name for name in EVAL if util.find_spec(name) is None]
    found = f"no: without {', '.join(missing)}" if missing else "yes: compare, tune, calibrate and pictures"
    return [Finding("evaluation", found, install("eval") if missing else "")]


def _vllm() -> Finding:
    """By its metadata alone: importing vLLM takes half a minute and prints."""
    from ..adapters.vllm.vllm_api import TOLD, written_for

    wanted = f"on a CUDA machine {install('vllm')}; for its CPU build, make setup-vllm (tried: vLLM {TOLD})"
    if util.find_spec("vllm") is None:
        return Finding("vLLM", "not installed", wanted)
    (name, *_) = metadata.packages_distributions().get("vllm", ["vllm"])
    held = metadata.version(name)
    if not written_for(held):
        return Finding("vLLM", f"{held}, which the plugin was not written for", wanted)
    known = any(point.name == "saccade" for point in metadata.entry_points(group="vllm.general_plugins"))
    advice = "" if known else "vLLM does not know the plugin: install saccade instead of running it from a folder"
    return Finding("vLLM", f"{held} (tried: {TOLD}): saccade serve --model MODEL", advice)
