"""Options that several commands share, under one name and with one explanation."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoints.preset_sizes import PRESETS


def number(metavar: str, help: str) -> Any:
    """An option that takes a number; whoever reads it knows its range."""

    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise typer.BadParameter(f"{str(text)!r} is not valid; a number is, such as 0.5") from None

    return typer.Option(parser=parse, metavar=metavar, help=help)


def count(help: str, minimum: int = 1, maximum: int = 2**31 - 1, *, metavar: str = "N") -> Any:
    """An option that takes a whole number."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise typer.BadParameter(f"{str(text)!r} is not valid; whole numbers from {minimum} to {maximum} are")
        return value

    return typer.Option(parser=parse, metavar=metavar, help=help)


def words(metavar: str, help: str) -> Any:
    """An option that takes anything; where it is left out, its help says what happens then."""
    return typer.Option(metavar=metavar, help=help)


def flag(name: str, help: str) -> Any:
    """An option that takes no value."""
    return typer.Option(name, help=help)


Model = Annotated[
    str | None,
    words("DIR_OR_HUB_ID", "A model folder or hub id (safetensors only, no remote code). Default: the bundled model."),
]
Device = Annotated[str, words("NAME", "auto, cpu, cuda, cuda:1, mps. auto: an accelerator if there is one.")]
Dtype = Annotated[
    str,
    words(
        "NAME",
        "auto, float32, bfloat16, float16. auto: what the checkpoint holds; "
        "float32 for the bundled model on a CPU, as its figures are.",
    ),
]
Seed = Annotated[int, count("Seed of everything random; the same seed gives the same answers.", 0)]
Threads = Annotated[
    int,
    count(
        "CPU threads of decoding; prefill uses what torch would. One is steady on a shared machine, and lets questions "
        "that are not timed be shared out among cores.",
        maximum=1024,
    ),
]
Document = Annotated[Path | None, words("FILE", "A UTF-8 text file.")]
OutputDir = Annotated[
    Path, words("DIR", "Results folder. A run that was interrupted goes on where it stopped if it gets the same one.")
]

# Of calibrations.
Task = Annotated[
    str,
    words(
        "NAME_OR_FILE",
        "kv: facts in sentences; several: three asked for at once; listing: facts in code; records: in JSON; passkey: "
        "ten passkeys of 32 words; or a file FILE.jsonl of objects with context, question and answer; or a "
        "benchmark's rows as `compare --task` takes them.",
    ),
]
Texts = Annotated[
    Path | None,
    words("FILE_OR_DIR", "Texts to read, UTF-8; such as the model will be used on. Default: Python's library."),
]
Context = Annotated[int, count("Length of the texts.", 128, metavar="TOKENS")]
Questions = Annotated[int, count("Questions in all, a dozen per text.", maximum=1_000_000)]
Budgets = Annotated[str, words("N,N", "Budgets in tokens.")]
RecipePath = Annotated[
    Path | None,
    words(
        "FILE",
        "Recipe to write; what it knows already stays. Put it beside the model's config.json to have it found. "
        "Default: saccade.json in the results folder.",
    ),
]

# Of benchmarks. Lists repeat, or are joined by commas.
Shape = Annotated[
    str,
    words("NAME_OR_DIR", f"{PRESETS}, or a folder; NAME:LAYERS:EXPERTS for its first layers, with so many experts."),
]
Policies = Annotated[list[str], words("SPEC", "Policy to time; give it once per policy.")]
TimedBudgets = Annotated[list[str], words("N,N", "Budgets for policies that have one and were not given one.")]
Batches = Annotated[list[str], words("N,N", "Rows decoded together.")]
ThreadCounts = Annotated[list[str], words("N,N", "CPU threads; one is steady on a shared machine.")]
ONE = ["1"]
RandomDtype = Annotated[str, typer.Option(help="float32, bfloat16, float16.")]
JsonFile = Annotated[Path | None, words("FILE", "Write everything measured there.")]
Picture = Annotated[Path | None, words("FILE.svg", "Draw it there.")]

# Of benchmarks of vLLM's engines.
VllmThreads = Annotated[int, count("CPU threads.")]
Block = Annotated[int | None, count("Tokens of a block of vLLM's cache. Default: 16 on CUDA, 32 on a CPU.", 16)]
Memory = Annotated[float, number("SHARE", "Share of a GPU's memory for vLLM.")]
TensorParallel = Annotated[int, count("GPUs that share the model.")]
RectifyTogether = Annotated[
    bool, flag("--rectify-together", "Rectified policies run the dense passes of a batch together.")
]
DraftRate = Annotated[float | None, number("A", "Chance that a draft stands if those before do.")]
CacheDtype = Annotated[
    str, words("NAME", "Of the cache, stock's too: auto (as --dtype), bfloat16, float16, fp8, fp8_e4m3.")
]
Quantization = Annotated[str | None, words("NAME", "Of weights, stock's too: fp8_per_tensor.")]
VllmDevice = Annotated[str, words("NAME", "auto, cpu, cuda: what vLLM was built for.")]
Resume = Annotated[bool, flag("--resume", "Go on with the rows that FILE of --json has already.")]
