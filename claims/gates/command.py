"""`python -m claims gates` and `roles`: trained gates, step by step, and what answers the roles keep that they give."""

from pathlib import Path
from typing import Annotated, Any

import typer

from saccade.cli.group import INTERRUPTED
from saccade.cli.options import Device, Dtype, Model, Seed, count, flag, number, words

PICTURE = "gates.svg"


def gates(
    model: Model = None,
    variants: Annotated[
        str, words("NAME,NAME", "letter, loss, share, multiplier, code: HardKuma gates; direct, direct-share.")
    ] = "letter,loss,direct,share,multiplier",
    target_heads: Annotated[
        int | None, count("KV heads that may read everything, those of layer 0 among them. Default: of 4 layers.")
    ] = None,
    seeds: Annotated[int, count("Runs of every variant.", maximum=100)] = 3,
    steps: Annotated[int, count("Training steps, one text each.")] = 3000,
    rate: Annotated[float, number("NUMBER", "Learning rate of gates and multiplier.")] = 0.01,
    kept: Annotated[float, number("SHARE", "Share of the text that a sparse head attends to in training.")] = 0.3,
    lengths: Annotated[str, words("N,N", "Shortest and longest text of training, in tokens.")] = "1024,10240",
    asked: Annotated[int, count("Questions per training text.", maximum=64)] = 10,
    every: Annotated[int, count("Steps between two records.")] = 20,
    task: Annotated[
        str, words("NAME", "How facts are stated, or a file; see `saccade calibrate heads --task`.")
    ] = "kv",
    drop_known: Annotated[
        bool, flag("--drop-known", "Of a task file, leave out questions that are answered without their text.")
    ] = False,
    together: Annotated[int, count("Variants of a seed that one process trains, whose texts are read once.")] = 3,
    workers: Annotated[int, count("Processes at a time. 0: three a CUDA device, on a CPU one.", 0)] = 0,
    minutes: Annotated[
        float | None, number("NUMBER", "Minutes, after which it stops; the same command goes on.")
    ] = None,
    output_dir: Annotated[Path, words("DIR", "Folder; a run that was cut off goes on there.")] = Path("results/gates"),
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
) -> None:
    """Train HardKuma gates, by the paper's multiplier and by others that know the size of the loss, and direct gates.

    The folder gets gates.json, written again and again while it runs, and at the end gates.svg: expected number of
    open gates, multiplier and loss over steps. What gates.json holds of other variants, trained likewise, stays in it.

    Examples:

      python -m claims gates --device cuda --minutes 8

      python -m claims gates --model DIR --dtype bfloat16 --variants share,direct-share,code --steps 2000
    """
    # Imported here, so that --help and a mistyped option do not wait for torch.
    from saccade.calibrate.heads import shortest_and_longest
    from saccade.calibrate.target import TargetSettings
    from saccade.cli.terminal import output, quiet_libraries, say, show
    from saccade.eval.output import write_json

    from .job import RESULTS, Trial
    from .table import progress_line, trial_table
    from .together import TrialSettings

    quiet_libraries()
    span = shortest_and_longest(lengths)
    common = TargetSettings(model, task, max(span), 1, output_dir, None, device, dtype, seed, 1)
    trial = Trial.check(
        TrialSettings(
            common, variants, target_heads, seeds, steps, rate, kept, span, asked, every, drop_known, together,
            workers, minutes,
        )
    )  # fmt: skip
    console = output()

    def keep(results: dict[str, Any]) -> None:
        write_json(output_dir / RESULTS, results, indent=None)
        say(console, progress_line(results))

    try:
        results = trial.run(keep)
    except KeyboardInterrupt:
        keep(trial.results())
        say(console, "interrupted; the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    show(trial_table(results), f"results: {output_dir / RESULTS}", *_drawn(results, output_dir / PICTURE))


def _drawn(results: dict[str, Any], path: Path) -> list[str]:
    """Draw, where matplotlib is there; gives what to say."""
    from saccade.files import replace_text

    try:
        from .picture import trial_picture
    except ModuleNotFoundError as error:
        return [f"no picture, {error.name} is missing; `python -m claims roles {path.with_suffix('.json')}` draws it"]
    replace_text(path, trial_picture(results))
    return [f"picture: {path}"]


def roles(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="gates.json of `python -m claims gates`.")],
    model: Model = None,
    output_dir: Annotated[Path, words("DIR", "Folder; a run that was cut off goes on there.")] = Path("results/roles"),
    device: Device = "auto",
    dtype: Dtype = "float32",
    threads: Annotated[int, count("CPU threads.", maximum=1024)] = 1,
) -> None:
    """Ask questions under the roles that trained gates give: those above one half, and exactly as many as wanted.

    The file gets its answers, and a picture beside it, as `gates` draws it. Last comes the variant that stands for
    HardKuma in the claims; since it is chosen by these answers, nothing about the questions is an option.

    Example:

      python -m claims roles results/gates/gates.json
    """
    from saccade.cli.terminal import progress, quiet_libraries, show
    from saccade.eval.output import check_file, write_json

    from ..subject import plain_subject
    from .answers import RoleAnswers
    from .choice import choice_of
    from .table import answer_table
    from .variants import DIRECTS

    quiet_libraries()
    choice = choice_of(model)
    work = RoleAnswers.check(file, output_dir, choice, plain_subject(model, device, dtype))
    check_file(file)
    with progress(work.units) as advance:
        results = work.run(advance, threads)
    write_json(file, results, indent=None)
    told = [f"answers: {file}", *_drawn(results, file.with_suffix(".svg"))]
    if any(run["variant"] in DIRECTS for run in results["runs"]):
        stands = choice.chosen(results) or f"none, no seeds open {results['target']} gates within {choice.near:g}"
        told.append(f"stands for HardKuma: {stands}")
    show(answer_table(results), *told)
