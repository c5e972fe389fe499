"""`saccade doctor`: what this machine has, what will run on it, and what to install."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from ..errors import install


class Finding(NamedTuple):
    """One line: what was looked for, what was found, and what to do about it ("": nothing)."""

    name: str
    found: str
    advice: str = ""


def doctor(
    model: Annotated[str | None, typer.Argument(metavar="DIR_OR_HUB_ID", help="Say which recipe it has, too.")] = None,
) -> None:
    """Say in ten lines what is installed, which kernels run where, and what is missing.

    Nothing is changed or compiled, and nothing downloaded but a hub id's configuration and recipe.

    Example:

      saccade doctor ./Qwen3-8B
    """
    from .terminal import output

    console = output()
    for name, found, advice in findings(model):
        console.print(f"{name:<14}{found}", highlight=False, markup=False, soft_wrap=True)
        if advice:
            console.print(f"{'':<14}→ {advice}", highlight=False, markup=False, soft_wrap=True, style="yellow")


def findings(model: str | None = None) -> list[Finding]:
    """All lines, in order; the last is on a model, if one is named."""
    from ..recipes.kept import known

    recipe = [] if model is None else [Finding("recipe", *known(model))]
    return [*_versions(), *_processor(), *_accelerator(), *_extras(), _vllm(), *recipe]


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
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("saccade-attention")
        other = distribution("saccade")
    except PackageNotFoundError:
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
    from importlib.util import find_spec

    from .group import EVAL

    missing = [name for name in EVAL if find_spec(name) is None]
    found = f"no: without {', '.join(missing)}" if missing else "yes: compare, tune, calibrate and pictures"
    return [Finding("evaluation", found, install("eval") if missing else "")]


def _vllm() -> Finding:
    """By its metadata alone: importing vLLM takes half a minute and prints."""
    from importlib.metadata import entry_points, packages_distributions, version
    from importlib.util import find_spec

    from ..adapters.vllm.vllm_api import TOLD, written_for

    wanted = f"on a CUDA machine {install('vllm')}; for its CPU build, make setup-vllm (tried: vLLM {TOLD})"
    if find_spec("vllm") is None:
        return Finding("vLLM", "not installed", wanted)
    (name, *_) = packages_distributions().get("vllm", ["vllm"])
    held = version(name)
    if not written_for(held):
        return Finding("vLLM", f"{held}, which the plugin was not written for", wanted)
    known = any(point.name == "saccade" for point in entry_points(group="vllm.general_plugins"))
    advice = "" if known else "vLLM does not know the plugin: install saccade instead of running it from a folder"
    return Finding("vLLM", f"{held} (tried: {TOLD}): saccade serve --model MODEL", advice)
